"""Measured records with spread: our own runs and other people's commands as arms that take turns."""
