"""Predicted against measured: what `dsim compare` reads, computes and draws."""
