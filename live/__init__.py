"""Runs policies in real time on a model."""
