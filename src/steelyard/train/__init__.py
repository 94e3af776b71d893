"""EXECUTED: the run itself."""
