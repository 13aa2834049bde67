"""The prediction of a mixture in host memory follows from its bytes and rates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vkbackend.meta.known_speed import Speed
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.experts.uses import Uses
from vkbackend.models.options import Options
from vkbackend.models.placement.cost import bus_bytes_per_row, cost_of
from vkbackend.models.placement.expert_use import even, zipf
from vkbackend.models.placement.layout import lay_out
from vkbackend.models.placement.mixture_plan import RAM, MixturePlan
from vkbackend.models.placement.tensors import check_weights
from vkbackend.tools import cli
from vkbackend.tools.measure import synthetic
from vkbackend.tools.measure.simulated import Hollow
from vkbackend.tools.plan_mixture import used_experts

pytestmark = pytest.mark.no_vulkan
N_EXPERT, N_USED, MEMORY, BUS = 16, 2, 7e11, 2.5e10


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> MixturePlan:
    shape = synthetic._mixture(N_EXPERT, N_USED, 64, **synthetic._dense(3, 256, 8, 4, 32, 768))
    monkeypatch.setitem(synthetic.SHAPES, "mixture", ("qwen3moe", 4096, False, shape))
    gguf = Hollow("mixture:f16")
    model = load_model(gguf)
    options = Options.of("mixture", devices=["0", "1"], tensor_split=[3, 1], override_tensor=["exps=CPU"])
    layout = lay_out(model, check_weights(gguf, model), 2, options)
    used = [even(N_EXPERT, N_USED)] * 3
    return MixturePlan(model, layout, cost_of(model, layout, ()), [Speed(MEMORY, BUS)] * 2, [0, 1], 0.5, used)


def test_a_token_takes_its_bytes_over_the_rates(plan: MixturePlan) -> None:
    expert = 3 * 64 * 256 * 2  # gate, up and down in f16
    assert plan.slot_nbytes == 3 * expert and plan.n_experts == N_EXPERT
    none, half, every = (plan.with_cache(n) for n in (0, N_EXPERT // 2, N_EXPERT))
    # The first device has three quarters of each expert.
    assert none.bus == 0.75 * 3 * N_USED * expert and half.bus == none.bus / 2 and every.bus == 0
    assert (none.hit_rate, half.hit_rate, every.hit_rate) == (0, 0.5, 1)
    assert half.nbytes == N_EXPERT // 2 * 3 * expert
    assert none.times.host_ms == pytest.approx(1e3 * none.bus / BUS) and none.times.reduce_ms == 0.5
    moved = none.times.host_ms - half.times.host_ms
    assert half.times.weights_ms - none.times.weights_ms == pytest.approx(moved * BUS / MEMORY)
    for kind, rate in RAM.items():
        experts_ms = 1e3 * 3 * N_USED * expert / rate
        assert none.cpu_ms[kind] == pytest.approx(none.times.total_ms - none.times.host_ms + experts_ms)
        assert every.cpu_ms[kind] == pytest.approx(every.times.total_ms)


def test_steps_read_an_expert_once(plan: MixturePlan) -> None:
    for n_rows in (1, 16, 2048):
        step = plan.steps(n_rows, N_EXPERT // 2, scratch=7, tile=8)
        want = max(bus_bytes_per_row(plan.model, plan.layout, n_rows))
        assert step.bus[0] == pytest.approx(want, rel=1e-5) and step.bus[1] == pytest.approx(
            want / 2, rel=1e-5
        )
        assert step.at_most[0] == pytest.approx(BUS / step.bus[0]) and step.scratch == 7
    few, every = plan.steps(512, 0, 0, 8), plan.steps(512, N_EXPERT, 0, 512)
    assert every.at_most == (pytest.approx(BUS / few.bus[0]), None)
    # Each of 16 experts has 64 of 1,024 pairs: 8 or 9 tiles of 8 pairs.
    assert 8 * few.bus[0] < few.bus_of_tiles < 9 * few.bus[0]
    assert every.bus_of_tiles == pytest.approx(every.bus[0], rel=1e-3)


def test_a_router_with_favourites_hits_more(plan: MixturePlan) -> None:
    favourite = replace(plan, used=[zipf(N_EXPERT, N_USED)] * 3).with_cache(4)
    assert favourite.hit_rate > plan.with_cache(4).hit_rate == 0.25
    assert favourite.times.total_ms < plan.with_cache(4).times.total_ms


def test_counts_of_earlier_runs_are_used(plan: MixturePlan, cached: Path) -> None:
    assert used_experts(plan.model, plan.layout, "mark")[1] is False
    uses = Uses(list(plan.layout.stacks), [N_EXPERT] * 3)
    uses.flat[:] = 1
    uses.of_layers[1][:2] = 7
    uses.save("mark")
    used, counted = used_experts(plan.model, plan.layout, "mark")
    assert counted and used[1][0] == 0.5 and used[0][0] == N_USED / N_EXPERT


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))
    return tmp_path


def test_the_command_predicts_a_mixture(
    models: Path, cached: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "-m", str(models / "stories-moe8x-Q4_0.gguf"), "-dev", "numpy", "-c", "2048", "-cmoe"]
    words += ["--gb-per-s", "700", "--bus-gb-per-s", "25", "--moe-cache-mib", "1", "-ub", "512"]
    assert cli.main([*words, "--json"]) == 0
    mixture = json.loads(capsys.readouterr().out)["mixture"]
    assert mixture["uses"] == "an even router" and mixture["n_experts"] == 8
    assert [row["n_slots"] for row in mixture["caches"]] == [0, 1, 8]
    assert [row["n_rows"] for row in mixture["steps"]] == [512, 2048]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "experts in host memory, hit rates of an even router" in shown and "1 of 8" in shown
