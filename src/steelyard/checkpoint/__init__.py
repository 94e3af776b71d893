"""Save, load on another layout, exchange."""
