"""What OneAutoTest adds to a LiBai or Megatron log: nvidia-smi rows inside it, and the configuration in its name.

`hs1024` and `nah16` are literal text in its scripts, `zero`, dropout, sequence length and chip are in no name.
"""

import re
from pathlib import Path

from steelyard.frameworks import devices
from steelyard.frameworks.lines import number
from steelyard.frameworks.reading import MIB, Reading

ROW = re.compile(
    r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d[.\d]{0,8}, ([^,]{3,60}), [\d.]{3,16}, \d{1,3} %, \d{1,3} %, "
    r"(\d{1,7}) MiB, (\d{1,7}) MiB, (\d{1,7}) MiB"
)
SUMMARY = re.compile(
    r"(?:mb(\d{1,5})_gb(\d{1,7}))?:?\s*(?:(\d{2,7}) ?MiB,?\s*)?gpu_rate\s*=\s*(\d{1,3})\s*%"
    r"(?:,\s*(?:total_)?through(?:put|out)\s*[:=]\s*([\d.]{1,12}) samples/s)?"
)
NAME_PARTS = {
    "nl": "model.num_layers", "hs": "model.hidden_size", "nah": "model.num_attention_heads", "mp": "parallel.tensor",
    "pp": "parallel.pipeline", "mb": "batch.micro_batch_size", "gb": "batch.global_batch_size",
    "mbs": "batch.micro_batch_size", "gbs": "batch.global_batch_size", "dp": "parallel.data",
}  # fmt: skip
NODES = re.compile(r"(\d{1,4})n(\d{1,3})g")
PART = re.compile(r"([a-z]+)(\d+)")


def feed(reading: Reading, line: int, text: str) -> bool:
    """A row of nvidia-smi, or the summary that people paste; False where the line is neither."""
    if "MiB," in text and (found := ROW.search(text)):
        total, used = int(found.group(2)), int(found.group(4))
        if used <= total:
            reading.device_bytes = max(reading.device_bytes, used * MIB)
            reading.attempts[-1].sources.setdefault("memory.device", reading.where(line))
            reading.conventions["memory"] = (
                "nvidia-smi's memory.used, one instant, the largest of every GPU of the node, in the job or not"
            )
            reading.set("hardware.chip", devices.chip(found.group(1), total / 1024), line)
        return True
    if "gpu_rate" in text and (found := SUMMARY.search(text)):
        _summary(reading, line, found)
        return True
    return False


def _summary(reading: Reading, line: int, found: re.Match[str]) -> None:
    micro, whole, used, rate, throughput = found.groups()
    if micro:
        reading.default("batch.micro_batch_size", int(micro), reading.where(line))
        reading.default("batch.global_batch_size", int(whole), reading.where(line))
    if used:
        reading.device_bytes = max(reading.device_bytes, int(used) * MIB)
        reading.attempts[-1].sources.setdefault("memory.device", reading.where(line))
        reading.conventions["memory"] = "nvidia-smi's memory.used, one instant"
    reading.print("gpu_rate", int(rate) / 100, line)
    if throughput:
        reading.print("samples_per_second", number(throughput), line)


def from_name(reading: Reading, path: Path) -> None:
    """What a file or its folder is called: `nl24_nah16_hs1024_FP16_acfalse_mp1_pp1_mb2_gb16_1n8g`."""
    name = next((part for part in (path.stem, path.parent.name) if re.search(r"(?:_|^)(?:nl|gpus)\d", part)), "")
    why = "the name of the file"
    words = name.split("_")
    for word in words:
        if (found := PART.fullmatch(word)) and found.group(1) in NAME_PARTS:
            reading.default(NAME_PARTS[found.group(1)], int(found.group(2)), why)
        elif word.upper() in ("FP16", "FP32", "BF16"):
            reading.default("precision.compute", word.lower(), why)
        elif word in ("actrue", "acfalse"):
            reading.default("recompute.mode", "full" if word == "actrue" else "none", why)
        elif found := NODES.fullmatch(word):
            world = int(found.group(1)) * int(found.group(2))
            axes = reading.config.get("parallel.tensor", 1) * reading.config.get("parallel.pipeline", 1)
            if axes and not world % axes:
                reading.default("parallel.data", world // axes, why)
