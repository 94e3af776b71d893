"""What a run will be, put together before launch."""
