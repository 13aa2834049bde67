"""Test the plan of a draft model, and the predicted speed-up by drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from oracles.eagle import eagle3
from oracles.fixture import write
from oracles.fixtures import build
from oracles.heads import with_head

from vkbackend.meta.balance import Times
from vkbackend.meta.rates import Rates
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options
from vkbackend.models.placement.cost import cost_function
from vkbackend.models.placement.draft_plan import head_token_ms, plan_draft, speed_up
from vkbackend.models.placement.fit import Budget, without
from vkbackend.models.placement.layout import lay_out
from vkbackend.models.placement.tensors import check_weights
from vkbackend.tools.measure.simulated import LIMITS, Hollow

pytestmark = pytest.mark.no_vulkan

CARDS = Times(weights_ms=5.0, host_ms=0.0, reduce_ms=1.9)  # 8B on two cards, with 30 us per exchange


def test_without_drafts_nothing_is_gained() -> None:
    assert speed_up(CARDS, CARDS, 0.7, 0) == 1.0
    assert speed_up(CARDS, CARDS, 0.0, 3) < 1.0, "the rows of rejected tokens cost time"


@pytest.mark.parametrize(("rate", "n", "expected"), [(0.5, 1, 1.45), (0.7, 3, 2.33), (0.85, 7, 4.2)])
def test_speed_up_over_two_cards(rate: float, n: int, expected: float) -> None:
    """The speed-up is the number of tokens per step divided by the relative time of the step's rows."""
    assert speed_up(CARDS, CARDS, rate, n) == pytest.approx(expected, rel=0.03)
    assert speed_up(CARDS, CARDS, rate, n, token_ms=1.0) < speed_up(CARDS, CARDS, rate, n)
    slow = Times(5.0, 0.0, 19.2)  # 300 us an exchange
    assert speed_up(slow, slow, rate, n) > speed_up(CARDS, CARDS, rate, n)


def test_the_draft_model_is_planned_on_its_device(models: Path) -> None:
    path, draft = (models / f"stories-{name}-F16.gguf" for name in ("w256", "narrow"))
    options = Options.of(path, devices="numpy,numpy", n_ctx=128, n_slots=2, draft=draft, draft_type_k="f32")
    wanted = options.of_draft
    assert wanted is not None and wanted.devices == ("numpy",) and wanted.type_k == "f32"
    assert (wanted.n_ctx, wanted.n_slots) == (128, 2) and options.speculation == ("draft",)
    devices = open_devices(wanted.devices)
    with GGUF.open(draft) as gguf:
        plan = plan_draft(gguf, wanted, devices)
    weights = sum(plan.held[0].homes[home] for home in ("weights", "mapped"))
    assert 0.8 < weights / draft.stat().st_size < 1.2
    assert plan.nbytes(0) > plan.held[0].homes["kv"] > 0
    assert plan.token_ms(Rates(1e9, 1e9)) == pytest.approx(plan.cost.read[0] / 1e6)
    budget = Budget("card", 1 << 30, (0, 1))
    left = without([budget], open_devices(options.devices), [plan.resident])
    assert left == [budget], "the host has no budget here"


@pytest.mark.parametrize(("n", "n_reduces"), [(1, 0), (2, 8)])
def test_a_drafted_token_of_a_head(tmp_path: Path, n: int, n_reduces: int) -> None:
    """The head reads its layer with two of eight experts, and the output matrix. It exchanges two sums."""
    fixture = with_head("glm4moe")
    options = Options.of(
        write(fixture, tmp_path / "model.gguf"), devices=["numpy"] * n, n_ctx=64, speculation="mtp"
    )
    options = replace(options, tensor_split=(1.0,) * n)
    with GGUF.open(options.path) as gguf:
        model = load_model(gguf, with_heads=True)
        types = check_weights(gguf, model)
    devices = open_devices(options.devices, options.runtime, exact=False)
    limits = [device.limits for device in devices]
    times = Times(8.0, 0.0, 2.0 * (n > 1))
    ms = head_token_ms(model, lay_out(model, types, n, options), options, limits, times, n_reduces)
    read = {name: v.size // (4 if "_exps." in name else 1) for name, v in fixture.tensors.items()}
    head = sum(size for name, size in read.items() if name.startswith(("blk.4.", "output.weight")))
    of_model = sum(size for name, size in read.items() if not name.startswith(("blk.4.", "token_embd")))
    expected = 8.0 * head / of_model + (2 * 2.0 / 8 if n > 1 else 0.0)
    # With two devices, each device has a complete eh_proj and complete norms.
    assert ms == pytest.approx(expected, rel=1e-3) if n == 1 else expected < ms < 1.3 * expected


@pytest.mark.parametrize("tables", [pytest.param((), marks=pytest.mark.wide), ("output",)])
def test_a_drafted_token_of_an_eagle3_head(tmp_path: Path, tables: tuple[str, ...]) -> None:
    """The head reads its layer without fc. It also reads the head's output matrix or the model's output
    matrix. Steps of the model read fc."""
    target = build("llama")
    head = eagle3(target, tables=tables, n_draft=96 if tables else 0)
    files = write(target, tmp_path / "model.gguf"), write(head, tmp_path / "head.gguf")
    options = replace(Options.of(files[0], devices="numpy", n_ctx=64, draft=files[1]), tensor_split=(1.0,))
    with GGUF.open(options.path) as gguf:
        model = load_model(gguf, head=options.head)
        types = check_weights(gguf, model)
    devices = open_devices(options.devices, options.runtime, exact=False)
    times = Times(8.0, 0.0, 0.0)
    ms = head_token_ms(model, lay_out(model, types, 1, options), options, [devices[0].limits], times, 0)
    sizes = {name: values.size for name, values in head.tensors.items() if name not in ("fc.weight", "d2t")}
    of_head = sum(sizes.values()) + (0 if tables else target["output.weight"].size)
    unread = ("token_embd.weight", "rope_freqs.weight")
    of_model = (
        sum(v.size for name, v in target.tensors.items() if name not in unread) + head["fc.weight"].size
    )
    assert ms == pytest.approx(8.0 * of_head / of_model, rel=1e-3)


def test_more_rows_read_more_experts_and_exchange_more_bytes() -> None:
    """On average, four rows that use 8 of 128 experts each use 29.1 experts together."""
    gguf = Hollow("qwen3-30b-a3b:f16")
    model = load_model(gguf)
    options = Options("a shape", devices=("numpy",) * 2, n_ctx=64)
    cost = cost_function(model, check_weights(gguf, model), options, [LIMITS] * 2)
    one, four = cost((1, 1)), cost((1, 1), 4)
    experts = sum(info.nbytes for name, info in gguf.tensors.items() if "_exps." in name) / 128
    assert sum(four.read) - sum(one.read) == pytest.approx(21.1 * experts, rel=0.01)
    assert four.reduces == tuple(4 * nbytes for nbytes in one.reduces) and len(one.reduces) == 96
    assert four.held == one.held
