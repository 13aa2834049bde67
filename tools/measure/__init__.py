"""Clocks, alternating runs, other programs and synthetic models, for commands that measure."""
