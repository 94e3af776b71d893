"""TorchTitan."""
