"""Speed and memory, ours beside peers, in one run: `make bench`."""
