"""Requests in, events out: the engine, its runner, and saved states."""
