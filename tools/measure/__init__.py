"""Helpers of commands that measure, such as clocks, alternating runs, other programs and synthetic models."""
