"""Files and signals: reading users' files, output folders, atomic writes, locks, Ctrl-C."""
