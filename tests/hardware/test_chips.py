"""Chips carry a source; unknown stays unknown."""

import pytest

from steelyard.hardware import chips, find
from steelyard.spec import UserError


@pytest.mark.parametrize("name", sorted(chips()))
def test_chip_is_complete(name):
    chip = chips()[name]
    assert chip.source and chip.memory_bytes > 2**33 and chip.peak
    assert all(1e12 < peak < 1e16 for peak in chip.peak.values())


def test_h100_peak_is_dense():
    """The data sheet's 1,979 TFLOP/s are with sparsity (karpathy/nanoGPT 464)."""
    assert find("H100-SXM5-80GB").peak["bf16"] == 989.4e12


def test_unknown_chips():
    assert find("") is None
    with pytest.raises(UserError, match="H100-SXM5-80GB"):
        find("H100-SXM5-80G")
