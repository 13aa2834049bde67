"""Helpers of commands that measure: clocks, alternation, other programs, synthetic models."""
