"""Files and signals: reading users' files, output folders, atomic writes, locks, and Ctrl-C."""
