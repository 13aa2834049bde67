"""Conversations: messages to a prompt, and the model's text to a message."""
