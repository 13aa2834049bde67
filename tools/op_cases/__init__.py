"""The cases of every op: shapes and inputs for tests, `verify`, `bench-ops` and `tune`."""
