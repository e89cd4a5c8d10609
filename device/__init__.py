"""Scenarios on this machine's device: served, measured, profiled, and validated against the twin."""
