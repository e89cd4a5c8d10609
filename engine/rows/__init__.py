"""Rows of a step, by kind: what each computes and sees, and what becomes of it."""
