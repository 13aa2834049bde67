"""From pixels to the encoder's patches: one file per family, with the rules of its reference processor."""
