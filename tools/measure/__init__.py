"""Shared by commands that measure: clocks, turns, other programs, synthetic models."""
