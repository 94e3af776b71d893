"""The same network on a mesh of ranks, on PyTorch's own engine, applied from outside."""
