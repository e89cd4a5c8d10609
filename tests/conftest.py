"""What every test may count on."""

import signal

# A shell that runs the tests in the background has them ignore Ctrl-C, which some of them are about.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
