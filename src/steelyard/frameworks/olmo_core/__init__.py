"""OLMo-core."""
