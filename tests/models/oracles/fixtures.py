"""All fixtures by name: the architecture, then `+` and what is special."""

from __future__ import annotations

from models.oracles import decoders, gemma, recurrent
from models.oracles.fixture import Fixture
from models.oracles.parts import BUILDERS

FIXTURES = tuple(BUILDERS)
assert decoders and gemma and recurrent  # imported to register theirs


def build(name: str) -> Fixture:
    fixture = Fixture(name, name.split("+")[0])
    BUILDERS[name](fixture)
    return fixture
