"""All fixtures by name: the architecture, then `+` and what is special."""

from __future__ import annotations

from oracles import dense, gemma, latent, layer_norm, mixtures, recurrent, state_space
from oracles.fixture import Fixture
from oracles.parts import BUILDERS

# These modules register their fixtures.
FAMILIES = dense, gemma, latent, layer_norm, mixtures, recurrent, state_space
FIXTURES = tuple(BUILDERS)


def build(name: str) -> Fixture:
    fixture = Fixture(name, name.split("+")[0])
    BUILDERS[name](fixture)
    return fixture
