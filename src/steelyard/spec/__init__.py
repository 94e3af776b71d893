"""ASKED: what a run is."""

from steelyard.spec.errors import UserError, error
from steelyard.spec.load import Loaded, load, resolve
from steelyard.spec.run import Run

__all__ = ["Loaded", "Run", "UserError", "error", "load", "resolve"]
