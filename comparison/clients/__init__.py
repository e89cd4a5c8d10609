"""Measured runs of servers that are not dsim's: what load generators and Prometheus wrote, read as runs."""
