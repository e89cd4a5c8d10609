"""Files and signals: what users wrote, where output may go, whole writes, locks, and what a Ctrl-C ends."""
