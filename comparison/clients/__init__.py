"""Measured runs of other servers: files of load generators and Prometheus, read as runs."""
