"""From logits to the next token: what may be asked for, the samplers, and the choice over many rows."""
