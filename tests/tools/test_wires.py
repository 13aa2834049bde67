from __future__ import annotations

import re

import pytest

from vkbackend.tools.measure import synthetic
from vkbackend.tools.studies import wires

pytestmark = pytest.mark.no_vulkan


def test_the_error_of_each_wire_follows_its_bits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = "llama", 300, False, synthetic._dense(9, 64, 4, 2, 16, 128)
    monkeypatch.setitem(synthetic.SHAPES, "tiny", shape)
    command = "wires -m tiny:Q8_0 -dev numpy,numpy --layers 2 --rows 5 --cache f32"
    monkeypatch.setattr("sys.argv", command.split())
    assert wires.main() == 0
    cells = re.findall(r"\| (\w+) \| ([-.e0-9]+) \|", capsys.readouterr().out)
    assert [wire for wire, _ in cells] == ["f32", "bf16", "f16"]
    f32, bf16, f16 = (float(nmse) for _, nmse in cells)
    # Three more bits divide the squared error by 64. The bounds allow a factor of 4 for chance. F32 has 13
    # bits more.
    assert 16 <= bf16 / f16 <= 256 and f32 < f16 / 1e4


def test_a_synthetic_model_may_have_fewer_layers() -> None:
    whole, single = synthetic.Synthetic("llama-8b:Q4_0"), synthetic.Synthetic("llama-8b:Q4_0", 1)
    assert {name for name in whole.tensors if name.startswith("blk.1.")}
    assert single.tensors.keys() == {n for n in whole.tensors if not n.startswith("blk.") or "blk.0." in n}
