"""Measured runs of other servers, read from load generators' and Prometheus files."""
