"""The shared brain, without clock or device: what runs next, and what came of it."""
