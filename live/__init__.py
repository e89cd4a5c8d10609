"""Runs the policies in real time: the serving loop, and whatever executes its steps."""
