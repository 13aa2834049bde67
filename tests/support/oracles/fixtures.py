"""All fixtures by name: the architecture, then `+` and what is special."""

from __future__ import annotations

from oracles import decoders, gemma, more_decoders, newer_decoders, recurrent, state_space
from oracles.fixture import Fixture
from oracles.parts import BUILDERS

FIXTURES = tuple(BUILDERS)
assert (
    decoders and gemma and more_decoders and newer_decoders and recurrent and state_space
)  # imported to register theirs


def build(name: str) -> Fixture:
    fixture = Fixture(name, name.split("+")[0])
    BUILDERS[name](fixture)
    return fixture
