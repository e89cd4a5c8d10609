"""Scenarios on this machine's device: serve, measure, profile, and validate the twin."""
