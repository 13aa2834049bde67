"""The Kompute runtime, which uses the `kp` package."""
