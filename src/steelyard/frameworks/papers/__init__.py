"""Definitions that come from papers and rules of thumb rather than from a program."""
