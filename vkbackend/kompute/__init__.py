"""The Kompute runtime: devices driven by the `kp` package."""
