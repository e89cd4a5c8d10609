"""Step logs from serving engines, in dsim's format."""
