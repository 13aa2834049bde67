"""The engine, which turns requests into events; its runner; saved states."""
