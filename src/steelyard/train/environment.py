"""What a run ran on: versions, devices, command."""

import os
import platform
import socket
import sys
import time
from typing import Any

import torch

import steelyard
from steelyard.record.schema import SCHEMA


def describe(device: torch.device) -> dict[str, Any]:
    """environment.json."""
    return {
        "schema": SCHEMA,
        "steelyard": steelyard.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": __import__("numpy").__version__,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "device": device.type,
        "device_name": device_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "world": int(os.environ.get("WORLD_SIZE", "1")),
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def device_name(device: torch.device) -> str:
    """The device's own name; a CPU's from /proc where there is one."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
    except OSError:
        return platform.processor() or "CPU"
