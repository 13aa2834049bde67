"""The cases of every op: shapes and inputs that tests, `verify`, `bench-ops` and `tune` share."""
