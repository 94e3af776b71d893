"""The network on one device. It knows no mesh: everything distributed is applied from outside (parallel/)."""
