"""A run: its scenario, its folder read back, its metrics and SLOs."""
