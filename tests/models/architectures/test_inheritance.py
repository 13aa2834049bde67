"""At most four classes lead from a model to the decoder, so that a reader need not search."""

from __future__ import annotations

import pytest

from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.registry import MODELS, model_class

pytestmark = pytest.mark.no_vulkan


def depth(model: type) -> int:
    """Return the largest number of classes between a class and the decoder, including the class."""
    return 0 if model is Decoder else 1 + max(depth(b) for b in model.__bases__ if issubclass(b, Decoder))


def test_depth_of_inheritance() -> None:
    models = {name: model_class(name) for name in MODELS}
    depths = {name: depth(model) for name, model in models.items() if issubclass(model, Decoder)}
    assert len(depths) > 80
    assert {name for name, n in depths.items() if n > 4} == set()
