"""All fixtures by name: the architecture, then `+` and what is special."""

from __future__ import annotations

from oracles import (
    decoders,
    gemma,
    more_decoders,
    newer_decoders,
    newer_mixtures,
    recurrent,
    sparse,
    state_space,
)
from oracles.fixture import Fixture
from oracles.parts import BUILDERS

MADE_OF = (  # these modules register their fixtures
    *(decoders, gemma, more_decoders, newer_decoders, newer_mixtures),
    *(recurrent, sparse, state_space),
)
FIXTURES = tuple(BUILDERS)


def build(name: str) -> Fixture:
    fixture = Fixture(name, name.split("+")[0])
    BUILDERS[name](fixture)
    return fixture
