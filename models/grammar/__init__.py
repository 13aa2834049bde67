"""Structured output: grammars that say which tokens may come next."""
