"""The engine turns requests into events. Here are also the runner, which replays steps, and saved states."""
