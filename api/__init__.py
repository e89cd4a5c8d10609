"""The functions of `import dsim`: the commands, for scripts and notebooks (docs/python.md)."""
