"""The compiled layer: 1:1 with C, no defaults, no cleverness."""
