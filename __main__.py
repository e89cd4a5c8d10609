"""`dsim`, and `python -m dsim`: the command line, and how it ends where Ctrl-C comes before its work or after it."""

import signal


def main() -> None:
    """Load the command line and run it."""
    try:
        from .cli import main as run

        run()
    except KeyboardInterrupt:
        from .files.interrupt import end_interrupted

        end_interrupted()
    finally:
        # All is written. What Ctrl-C ends now is Python waiting for idle workers, which it would tell at length.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
