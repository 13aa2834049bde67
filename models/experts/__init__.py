"""Chooses which experts are in device memory, if the others are in host memory."""
