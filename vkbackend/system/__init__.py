"""Differences between operating systems, with one module per concern. Only this folder asks which system
runs."""
