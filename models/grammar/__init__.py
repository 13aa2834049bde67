"""Structured output: grammars that decide which tokens may come next."""
