"""All fixtures by name. A name is the architecture, and for a variant also `+` and the variant's name."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache
from importlib import import_module

import numpy as np
from oracles.fixture import Fixture
from oracles.parts import BUILDERS

FAMILIES = (
    "alibi",
    "dense",
    "earlier",
    "gemma",
    "kimi_delta",
    "latent",
    "layer_norm",
    "mixtures",
    "near_llama",
    "recurrent",
    "sigmoid_mixtures",
    "softmax_mixtures",
    "state_space",
    "uneven",
)
for _name in FAMILIES:
    import_module(f"oracles.{_name}")
FIXTURES = tuple(BUILDERS)


def build(name: str) -> Fixture:
    """Return a fixture that the caller may change, except for the values in its arrays."""
    built = _built(name)
    return replace(built, keys=deepcopy(built.keys), tensors={**built.tensors})


class _Outline(Fixture):
    """A fixture without random values, which take most of the time."""

    def normal(self, name: str, *shape: int) -> np.ndarray:
        return np.ones(shape, np.float32)


@cache
def is_mixture(name: str) -> bool:
    outline = _Outline(name, name.split("+")[0])
    BUILDERS[name](outline)
    return any(key.endswith("expert_count") for key in outline.keys)


@cache
def _built(name: str) -> Fixture:
    fixture = Fixture(name, name.split("+")[0])
    BUILDERS[name](fixture)
    for values in fixture.tensors.values():
        values.setflags(write=False)
    return fixture
