"""Other systems' checkpoints, in and out."""
