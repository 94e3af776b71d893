"""SHOWN: what a person reads."""
