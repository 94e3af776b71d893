"""TensorBoard: the event files that most frameworks write beside their log."""
