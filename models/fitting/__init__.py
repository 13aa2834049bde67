"""Chooses the options of a model that fit the devices (`--fit`)."""
