"""These tests bound the error of 8-bit activations, compared with float64 products of unrounded
activations."""

from __future__ import annotations

import numpy as np
import pytest
from device_sets import nmse

from vkbackend import ops
from vkbackend.buffer import Home, View
from vkbackend.formats import dequantize, row_nbytes
from vkbackend.limits import Limits
from vkbackend.ops import Recorder
from vkbackend.recording import Recording
from vkbackend.runtime import Device
from vkbackend.tools.op_cases.quantized import TYPES
from vkbackend.tools.op_cases.setup import weights
from vkbackend.twins.device import NumpyDevice

FEW, MANY = ("mat_dot",), ("mat_mul_dot",)
CHOICES = (("one", FEW), ("few", FEW), ("some", MANY), ("more", MANY), ("many", MANY))
DOTS = Limits(features=frozenset(ops.OPS["mat_dot"].needs), choices=CHOICES)


def error(device: Device, limits: Limits, kind: str, n_rows: int) -> float:
    """Return the NMSE for normally distributed activations. A tenth of them is multiplied by 4."""
    rng, n, k = np.random.default_rng(n_rows), 33, 768
    raw = np.ascontiguousarray(weights(rng, kind, n, k).raw).reshape(-1).view(np.uint8)
    x = rng.normal(size=(n_rows, k)) * rng.choice([1, 4], (n_rows, k), p=[0.9, 0.1])
    x = x.astype(np.float32)
    shapes = {"w": ((n, k), kind), "x": (x.shape, "f32"), "q": (x.shape, "q8"), "y": ((n_rows, n), "f32")}
    views = {}
    for name, (shape, dtype) in shapes.items():
        buffer = device.buffer(shape[0] * row_nbytes(dtype, shape[1]), Home.SCRATCH, name)
        views[name] = View(buffer, 0, shape, dtype)
    device.write(views["w"], np.pad(raw, (0, views["w"].nbytes - raw.size)))
    device.write(views["x"], x)
    recording = Recording("product")
    assert ops.operand_type(limits, n_rows, kind) == "q8"
    Recorder(recording, limits).quantize_q8(views["x"], views["q"])
    Recorder(recording, limits).mat(views["w"], views["q"], views["y"])
    device.run(recording)
    got = device.read(views["y"])[: 4 * n_rows * n].view(np.float32).reshape(n_rows, n)
    for view in views.values():
        device.free(view.buffer)  # type: ignore[arg-type]
    return nmse(got, x.astype(np.float64) @ dequantize(raw, kind, (n, k)).astype(np.float64).T)


@pytest.mark.parametrize("kind", TYPES)
def test_error_in_numpy(kind: str) -> None:
    """The measured NMSEs are 5e-5 to 9e-5."""
    assert 1e-7 < error(NumpyDevice("numpy"), DOTS, kind, 9) <= 5e-4


@pytest.mark.parametrize("n_rows", [1, 9])
@pytest.mark.parametrize("kind", ["q8_0", "q4_k"])
def test_error(device: Device, kind: str, n_rows: int) -> None:
    if not device.limits.features.issuperset(DOTS.features):
        pytest.skip(f"{device.name} lacks {', '.join(sorted(DOTS.features - device.limits.features))}")
    limits = Limits(features=DOTS.features, choices=CHOICES, subgroup_size=device.limits.subgroup_size)
    assert 1e-7 < error(device, limits, kind, n_rows) <= 5e-4
