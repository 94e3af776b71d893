"""Stand-alone calculators."""
