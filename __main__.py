"""`python -m dsim` is `dsim`."""

from .cli import main

main()
