"""Scripts that read a checkout: its imports and its prose. A wheel does not contain them."""
