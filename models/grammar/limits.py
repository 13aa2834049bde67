"""Limits for computing one mask. They apply when a grammar is tried and when it is used."""

from typing import Any

# The limits are the parser's items and the lexer's fuel. A deliberately slow grammar fails after 0.4 s per
# mask. With llguidance's default of 50,000 items, it would fail after 3 s.
LIMITS: dict[str, Any] = {"step_max_items": 20_000, "step_lexer_fuel": 200_000, "verbose_errors": False}
