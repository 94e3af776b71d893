"""COMPARED: may two runs be compared, and what explains their difference?"""

from steelyard.compare.verdict import Comparison, compare

__all__ = ["Comparison", "compare"]
