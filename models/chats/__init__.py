"""Conversations: messages become a prompt, and the model's text becomes a message."""
