"""The cases of every op, which are shapes and inputs for tests, `verify`, `bench-ops` and `tune`."""
