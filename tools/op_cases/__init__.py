"""Cases (shapes and inputs) of every op, for tests, `verify`, `bench-ops` and `tune`."""
