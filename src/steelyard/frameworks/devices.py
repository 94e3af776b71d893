"""Names that drivers give a device -> a chip of hardware/chips.toml."""

import re

# (what must stand in the name, GiB of memory between, chip)
KNOWN = (
    (r"V100", (15, 17), "V100-SXM2-16GB"),
    (r"V100", (31, 33), "V100-SXM2-32GB"),
    (r"P100-PCIE", (15, 17), "P100-PCIE-16GB"),
    (r"\bT4\b", (14, 17), "T4"),
    (r"A100-SXM4", (38, 41), "A100-SXM4-40GB"),
    (r"A100-SXM4|A100-SXM-80GB", (78, 82), "A100-SXM4-80GB"),
    (r"H100 80GB HBM3|H100 SXM|H100-SXM", (78, 82), "H100-SXM5-80GB"),
    (r"\bH200\b", (139, 145), "H200-SXM5-141GB"),
    (r"\bB200\b", (175, 195), "B200-SXM-192GB"),
    (r"MI250X", (60, 130), "MI250X"),
    (r"MI300X", (185, 195), "MI300X"),
)


def chip(name: str, gibibytes: float | None = None) -> str | None:
    """The chip of that name and memory (GiB); None where the two do not settle it. PCIe cards of a family with another
    peak are not taken for the SXM ones."""
    if gibibytes is None and (said := re.search(r"(\d{2,3}) ?GB", name)):
        gibibytes = float(said.group(1))
    for pattern, (low, high), found in KNOWN:
        if re.search(pattern, name) and gibibytes is not None and low <= gibibytes <= high:
            if "PCI" in name.upper() and "PCIE" not in found:
                return None
            return found
    return None
