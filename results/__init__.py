"""A run: its world, its folder read back, its metrics and SLOs."""
