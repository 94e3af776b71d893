"""Lingua."""
