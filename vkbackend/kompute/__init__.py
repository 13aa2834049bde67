"""The Kompute runtime: a device behind the seam whose work the `kp` package does."""
