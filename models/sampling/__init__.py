"""From logits to the next token: the parameters, the samplers, and the choice for many rows at once."""
