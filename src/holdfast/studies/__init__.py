"""Studies: many runs of a few ways to train, and what can be said of them."""
