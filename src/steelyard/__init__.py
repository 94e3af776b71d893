"""Steelyard: plan, train, measure and compare GPT pretraining runs."""

__version__ = "0.1.0"
