"""Scripts that read a checkout: its imports, its prose, the package as it is installed."""
