"""The engine, its runner, and saved states."""
