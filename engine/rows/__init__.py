"""Rows of a step, by kind: what each computes and sees, and how it is committed."""
