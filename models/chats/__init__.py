"""Turns messages into a prompt, and the model's text into a message."""
