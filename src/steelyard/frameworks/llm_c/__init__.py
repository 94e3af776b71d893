"""llm.c."""
