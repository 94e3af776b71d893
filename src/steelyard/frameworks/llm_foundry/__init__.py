"""Composer and LLM-Foundry."""
