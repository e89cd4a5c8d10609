"""Published experiments as named configurations: the published values next to the twin's."""
