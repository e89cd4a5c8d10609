"""The functions of `import dsim`: what the commands do, for scripts and notebooks (docs/python.md)."""
