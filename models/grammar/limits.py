"""Limits for one mask, when a grammar is tried and when it is used."""

from typing import Any

# Items of the parser and fuel of the lexer. A deliberately slow grammar fails after 0.4 s per mask, and with
# llguidance's default of 50,000 items after 3 s.
LIMITS: dict[str, Any] = {"step_max_items": 20_000, "step_lexer_fuel": 200_000, "verbose_errors": False}
