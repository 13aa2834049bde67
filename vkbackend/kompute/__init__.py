"""The Kompute runtime, which uses Kompute's Python package `kp`."""
