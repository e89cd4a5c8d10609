"""Published experiments as named configurations: what was published beside what the twin says of the same run."""
