"""SHOWN: the command line, one file per verb."""
