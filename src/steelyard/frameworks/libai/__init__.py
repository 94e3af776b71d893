"""LiBai."""
