"""Decisions from the twin: how much a fleet sustains, which settings are best, and how sure that is."""
