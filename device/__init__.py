"""Worlds on this machine's device: serve, measure, profile, validate."""
