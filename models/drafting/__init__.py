"""Guesses the next tokens of a sequence, which the model then verifies in one step."""
