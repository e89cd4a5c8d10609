"""`dsim`, and `python -m dsim`: the command line, and how it ends where Ctrl-C comes while it is loaded."""

import sys


def main() -> None:
    """Load the command line and run it."""
    try:
        from .cli import main as run
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
