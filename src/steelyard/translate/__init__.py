"""Other people's launch scripts in, and a run file out into their form. Nothing that is read here is ever run."""
