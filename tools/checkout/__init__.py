"""Scripts that read a checkout: its imports and its prose. Wheels do not contain these scripts."""
