"""Logs of OLMo-core: a header `[step=S/N,...]` and one indented `name=value` per metric, three to four digits. `TPS` is
per device, `BPS` steps a second. Source: OLMo-core `train/callbacks/console_logger.py`.
"""

import re

from steelyard.frameworks import devices
from steelyard.frameworks.lines import number, whole
from steelyard.frameworks.reading import GIB, Reading

NAME = "OLMo-core"

MARKS = (
    re.compile(r"\[step=\d+/\d+,epoch=\d+"),
    re.compile(r"^\s{4}throughput/device/(?:TPS|tokens_per_second)"),
    re.compile(r"^\s{4}train/(?:CE loss|CrossEntropyLoss)="),
    re.compile(r"Building transformer with [\d,]+ total params"),
)
HEADER = re.compile(r"\[step=(\d{1,12})/(\d{1,12}),epoch=\d{1,6}(?:,[^\]]{0,80})?\]")
METRIC = re.compile(r"^\s{4}([\w/() %-]{2,60})=(-?[\d.,]{1,18}(?:[eE][-+]?\d{1,3})?)([BTPE]?)\s*$")
SIZE = re.compile(r"Building transformer with ([\d,]{1,24}) total params")
CAPACITY = re.compile(r"GPU capacity: (.{3,60}?) with ([\d.]{1,10})GiB memory")
UNITS = {"": 1.0, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
LOSS = ("train/CE loss", "train/CrossEntropyLoss")
TPS = ("throughput/device/TPS", "throughput/device/tokens_per_second")
MEMORY = {
    "gpu_memory/GPU active mem (GiB)": "active_peak", "system/GPU active mem (GiB)": "active_peak",
    "gpu_memory/GPU reserved mem (GiB)": "reserved_peak", "system/GPU reserved mem (GiB)": "reserved_peak",
}  # fmt: skip


class Reader:
    def __init__(self, source: str):
        self.reading = Reading(NAME, source)
        self.reading.conventions = {
            "loss": "this step, all ranks, three to four digits",
            "seconds": "1 / BPS",
            "memory": "PyTorch's active and reserved peaks, GiB",
        }
        self.open: tuple[int, int] | None = None  # (line, step) of the metrics that follow
        self.metrics: dict[str, float] = {}

    def feed(self, line: int, text: str) -> None:
        if "[step=" in text and (header := HEADER.search(text)):
            self._close()
            self.open = (line, int(header.group(1)))
            self.reading.set("length.steps", int(header.group(2)), line)
        elif self.open is not None and "=" in text and (metric := METRIC.match(text)):
            value = number(metric.group(2).replace(",", ""))
            if value is not None:
                self.metrics[metric.group(1).strip()] = value * UNITS[metric.group(3)]
        elif "total params" in text and (size := SIZE.search(text)):
            self.reading.print("parameters", whole(size.group(1)), line)
        elif "GPU capacity" in text and (capacity := CAPACITY.search(text)):
            self.reading.set("hardware.chip", devices.chip(capacity.group(1), number(capacity.group(2))), line)

    def _close(self) -> None:
        if self.open is None:
            return
        metrics, (line, step) = self.metrics, self.open
        self.metrics, self.open = {}, None
        loss = next((metrics[name] for name in LOSS if name in metrics), None)
        rate = next((metrics[name] for name in TPS if name in metrics), None)
        pace = metrics.get("throughput/device/BPS")
        if loss is None and rate is None:
            return
        if rate is not None:
            self.reading.print("tokens_per_second_per_device", rate, line)
        total = metrics.get("throughput/total tokens")
        self.reading.step(
            line,
            step,
            tokens=int(total) if total is not None and total < 1e9 else None,  # above, rounded to four digits
            loss=loss,
            grad_norm=metrics.get("optim/total grad norm"),
            learning_rate=metrics.get("optim/LR (group 0)"),
            seconds=1 / pace if pace else None,
            memory={kind: round(metrics[name] * GIB) for name, kind in MEMORY.items() if name in metrics},
        )

    def finish(self) -> None:
        self._close()
