"""Files and signals: reading users' files, places for output, whole writes, locks, and Ctrl-C."""
