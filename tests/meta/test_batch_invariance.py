"""A step of 1 to MAX_VEC_ROWS rows computes each row with the same ops, splits and wire formats as a one-row
step. The devices are simulated with the limits of several vendors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from device_sets import covering

from vkbackend import env
from vkbackend.limits import Limits, MatrixUnits
from vkbackend.meta.recorded_steps import Step
from vkbackend.meta.step_kind import StepKind, bucket, mix_of
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.options import Options
from vkbackend.ops import MAX_VEC_ROWS
from vkbackend.recording import Dispatch
from vkbackend.step import Mix
from vkbackend.tools.measure import synthetic
from vkbackend.tools.measure.simulated import LIMITS, Hollow, SimulatedDevice

pytestmark = pytest.mark.no_vulkan

GPU = frozenset(LIMITS.features | {"buffer_address"})
VENDORS = {
    "amd": replace(LIMITS, features=GPU),
    "nvidia": replace(LIMITS, subgroup_size=32, matrix_units=MatrixUnits(int8_k=32), features=GPU),
    "intel": replace(LIMITS, subgroup_size=16, matrix_units=MatrixUnits("khr", 8, 16, 16, 16), features=GPU),
    "floor": Limits.floor(),
    "lavapipe": Limits(1024, 32_768, subgroup_size=8, is_cpu=True, features=GPU),
}
# These measurements prefer different ops for one row and for several.
TUNED = (("one", ("mat_vec",)), ("few", ("mat_wave", "mat_lane")))
# 8 rows of 4096 elements are the smallest sums that two devices send as F16. With 8 experts, 8 rows with 2
# experts each are the fewest that are computed in tiles.
DENSE = synthetic._dense(2, 4096, 32, 8, 128, 4096)
MIXTURE = synthetic._mixture(8, 2, 1024, **synthetic._dense(2, 4096, 32, 4, 128, 1024))
SHAPES: dict[str, tuple[str, int, bool, dict[str, Any]]] = {
    "dense": ("llama", 8192, False, DENSE),
    "mixture": ("qwen3moe", 8192, False, MIXTURE),
    "latent": ("deepseek2", 8192, False, synthetic._mixture(16, 2, 512, **synthetic._LATENT) | {
        "block_count": 4, "embedding_length": 4096, "attention.head_count": 16, "feed_forward_length": 1024,
    }),
}  # fmt: skip
# These constants and push constants are numbers of rows, or say whether rows are read in tiles. The order of
# additions does not depend on them. A thread of a product computes a sum for each of its N rows. mat_lane_id
# adds in the same order for pairs in tiles, which it reads through `moe_group`.
OF_ROWS = frozenset({"N", "GROUPED", "n_rows", "n_pairs"})
OF_ROWS_IN = {
    # glu and add: number of elements; embed: number of output rows
    **{"glu": {"n"}, "add": {"n"}, "embed": {"n_vocab"}},
    # A workgroup computes ROWS rows. If ROWS is larger, a thread reads fewer vectors ahead (BATCH), or a tile
    # has more groups of rows.
    **{"attn_decode": {"ROWS", "BATCH"}, "attn_decode_coop": {"ROWS", "ROW_GROUPS", "LOCAL"}},
}


def opened(shape: str, limits: Limits, n_devices: int = 2) -> Runner:
    devices = [SimulatedDevice(i, 1 << 40, limits) for i in range(n_devices)]
    names, name = [device.name for device in devices], f"{shape}:Q4_K"
    options = Options.of(
        name, devices=names, n_ctx=8192, n_ubatch=64, use_mmap=False, tensor_split=[1] * n_devices
    )
    return Runner(options, Hollow(name), devices=devices)


def steps(runner: Runner) -> Iterator[Step]:
    """Record steps whose rows belong to one sequence, and steps with a sequence per row."""
    for rows in sorted({bucket(n) for n in range(1, MAX_VEC_ROWS + 1)}):
        kind = StepKind.of_run(rows, rows)
        for mix in sorted({kind.mix, Mix.DECODE}, reverse=True):
            yield runner.mesh.recorded_step(kind._replace(mix=mix))


def work_of(step: Step) -> list[object]:
    """Return the properties that may change a row's bits: the wire format of each sum, and each op with its
    variant, its operands' formats and its constants. The constants include the number of key splits."""
    work: list[object] = [[reduce.wire for reduce in step.reduces if reduce]]
    for executable in step.executables:
        for d in executable.recording.accesses():
            if isinstance(d, Dispatch) and d.op != "moe_group":
                values = dict((*d.consts, *d.push))
                kept = {name: values[name] for name in values.keys() - OF_ROWS - OF_ROWS_IN.get(d.op, set())}
                work.append((d.op, d.variant, [view.dtype for view in d.args], kept))
    return work


@pytest.fixture(autouse=True)
def _shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shape in SHAPES.items():
        monkeypatch.setitem(synthetic.SHAPES, name, shape)
    # The suite's default is exact computation with F32 partial sums.
    monkeypatch.delenv("VKBACKEND_EXACT", raising=False)
    monkeypatch.setenv(env.CACHE, "off")  # the speed of simulated devices cannot be measured


@pytest.mark.parametrize(("vendor", "shape"), covering(list(VENDORS), list(SHAPES)))
@pytest.mark.parametrize("exact", [True, pytest.param(False, marks=pytest.mark.wide)])
def test_few_rows_have_the_work_of_one_row(vendor: str, shape: str, exact: bool) -> None:
    """`batch_invariant` must have this effect without `exact` too, because speculation sets `batch_invariant`
    on any device."""
    limits = replace(VENDORS[vendor], choices=TUNED)
    limits = limits.exact() if exact else replace(limits, batch_invariant=True)
    single, *more = (work_of(step) for step in steps(opened(shape, limits)))
    assert len(more) == 6 and all(work == single for work in more)


def dispatches(step: Step) -> list[Dispatch]:
    return [d for d in step.executables[0].recording.accesses() if isinstance(d, Dispatch)]


RULES: dict[str, tuple[str, str, Callable[[Step], object]]] = {
    "ops": ("intel", "dense", lambda step: {d.op for d in dispatches(step) if d.op.startswith("mat_")}),
    "splits": ("amd", "dense", lambda step: {dict(d.push).get("n_splits") for d in dispatches(step)}),
    "wires": ("nvidia", "dense", lambda step: [reduce.wire for reduce in step.reduces if reduce]),
    "groups": ("floor", "mixture", lambda step: {d.op for d in dispatches(step) if d.op.startswith("moe")}),
}


@pytest.mark.wide
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_needed(rule: str) -> None:
    vendor, shape, look = RULES[rule]
    limits = replace(VENDORS[vendor], choices=TUNED)
    for invariant in (False, True):
        single, *_, eight = steps(opened(shape, replace(limits, batch_invariant=invariant)))
        assert (look(single) == look(eight)) is invariant


def test_steps_of_more_rows_are_prefills() -> None:
    assert [mix_of(n) is Mix.PREFILL for n in (MAX_VEC_ROWS, MAX_VEC_ROWS + 1)] == [False, True]
