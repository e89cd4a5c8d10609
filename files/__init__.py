"""Files and signals: where output may go, how it is written whole, who holds a folder, and what a Ctrl-C may end."""
