"""Conversations: from messages to a prompt, and from the model's text to a message."""
