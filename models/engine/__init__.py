"""The engine, which turns requests into events, the runner that computes its steps, and saved states."""
