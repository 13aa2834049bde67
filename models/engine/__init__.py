"""The engine takes requests and returns events; with its runner and saved states."""
