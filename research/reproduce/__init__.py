"""Published experiments as configurations: published values next to the twin's."""
