"""All fixtures by name: the architecture, then `+` and the variant if there is one."""

from __future__ import annotations

from oracles import dense, gemma, latent, layer_norm, mixtures, recurrent, state_space
from oracles.fixture import Fixture
from oracles.parts import BUILDERS

FAMILIES = dense, gemma, latent, layer_norm, mixtures, recurrent, state_space
FIXTURES = tuple(BUILDERS)


def build(name: str) -> Fixture:
    fixture = Fixture(name, name.split("+")[0])
    BUILDERS[name](fixture)
    return fixture
