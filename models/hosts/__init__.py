"""Runs one model on several machines."""
