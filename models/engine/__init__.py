"""The engine: requests in, events out; the runner that replays steps, saved states."""
