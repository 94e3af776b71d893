"""RECORDED: one schema for our runs and everyone else's."""
