"""The shared brain: what runs next and what came of it, with neither clock nor device."""
