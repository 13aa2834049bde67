"""Adapters produce the same logits as merged weights, in one batch and on any devices, without additional
exchanges."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import DENSE, EXPERTS, Pairs, merged, random_pairs, write_adapter
from device_sets import nmse, one_driver, only, product, two_drivers, wide
from oracles.fixture import PROMPT, Fixture, write
from oracles.fixtures import FIXTURES, build
from runners import F32, load_runner

from vkbackend import hazards
from vkbackend.meta.sizing import form_of
from vkbackend.meta.step_kind import StepKind
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.recording import Copy
from vkbackend.step import Run

N = 8
OPTIONS: dict[str, Any] = {"n_ctx": 64, "n_ubatch": 64, "n_slots": 4, **F32}
CHOICES: list[tuple[tuple[int, float], ...]] = [(), ((0, 1.0),), ((1, 0.5),), ((0, 1.0), (1, -0.25))]
# llama's merged weights on numpy differ by up to 1e-12, because f32 sums are rounded in another order.
BOUND = 1e-11
MORE = (
    r"|blk\.\d+\.(ffn_(gate|up|down)_shexp|attn_q_[ab]|attn_kv_a_mqa|ssm_(in|out)|shortconv\.(in|out)_proj)"
)
ANY = f"{DENSE}{MORE}\\.weight|output\\.weight|{EXPERTS}"


class Adapted:
    """A model, two adapters (ranks 4 and 6), and the merged models' logits for each choice of adapters."""

    def __init__(self, name: str, pattern: str, folder: Path) -> None:
        self.fixture: Fixture = build(name)
        self.path = write(self.fixture, folder / "model.gguf")
        self.pairs: list[Pairs] = [random_pairs(self.fixture, rank, pattern) for rank in (4, 6)]
        self.files = [
            write_adapter(folder / f"adapter{i}.gguf", self.fixture.arch, pairs)
            for i, pairs in enumerate(self.pairs)
        ]
        self.want = []
        for i, choice in enumerate(CHOICES):
            model = merged(self.fixture, [(self.pairs[a], s) for a, s in choice])
            runner = load_runner(write(model, folder / f"merged{i}.gguf"), devices=["numpy"], **OPTIONS)
            self.want.append(runner.step(PROMPT[:N], [Run(0, 0, N, 0)], range(N)).copy())
            runner.close()

    def open(self, devices: list[str], **options: Any) -> Runner:
        return load_runner(self.path, devices=devices, **{**OPTIONS, "lora": self.files, **options})

    def check(self, devices: list[str], bound: float = BOUND, **options: Any) -> None:
        """Compute four prompts with four choices of adapters in one batch, and each prompt alone."""
        runner = self.open(devices, **options)
        try:
            runs = [Run(i, N * i, N, 0, adapters=choice) for i, choice in enumerate(CHOICES)]
            together = runner.step(PROMPT[:N] * 4, runs, range(4 * N)).copy()
            for i, (choice, want) in enumerate(zip(CHOICES, self.want, strict=True)):
                assert nmse(together[N * i : N * (i + 1)], want) <= bound, choice
                runner.step(PROMPT[: N - 1], [Run(i, 0, N - 1, 0, adapters=choice)], [])
                last = runner.step(PROMPT[N - 1 : N], [Run(i, 0, 1, N - 1, adapters=choice)], [0])
                assert nmse(last, want[N - 1 :]) <= bound, choice
        finally:
            runner.close()


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted("qwen3", f"{DENSE}|output\\.weight", tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted("qwen3moe", f"{DENSE}|{EXPERTS}", tmp_path_factory.mktemp("experts"))


@pytest.fixture
def adapted(request: pytest.FixtureRequest) -> Adapted:
    model: Adapted = request.getfixturevalue(request.param)
    return model


def test_the_adapters_change_the_logits(dense: Adapted, experts: Adapted) -> None:
    for adapted in (dense, experts):
        for want in adapted.want[1:]:
            assert nmse(want, adapted.want[0]) > 0.1


SPLITS = [
    pytest.param(3, {"tensor_split": [5, 2, 1]}, id="5:2:1"),
    pytest.param(2, {"split_mode": "layer", "n_gpu_layers": 2}, id="layer"),
    pytest.param(1, {}, id="1"),
    pytest.param(2, {}, id="2"),
    pytest.param(2, {"override_tensor": "ffn_=CPU"}, id="ffn on the host"),
    pytest.param(3, {"split_policy": "llama.cpp"}, id="llama.cpp"),
    pytest.param(1, {"n_gpu_layers": 0}, id="0 layers"),
]
MODELS = "dense", "experts"


@pytest.mark.no_vulkan
@pytest.mark.parametrize(
    ("adapted", "n", "options"), only(product(MODELS, SPLITS), "experts-5:2:1"), indirect=["adapted"]
)
def test_on_numpy(adapted: Adapted, n: int, options: dict[str, Any]) -> None:
    adapted.check(["numpy"] * n, **options)


SETS = [
    pytest.param(["0", "0"], marks=one_driver, id="0,0"),
    pytest.param(["1", "1", "1"], marks=two_drivers, id="1,1,1"),
    pytest.param(["0", "1"], marks=two_drivers, id="0,1"),
    pytest.param(["0"], marks=one_driver, id="0"),
]


@pytest.mark.parametrize(
    ("adapted", "devices"), only(product(MODELS, SETS), "dense-0,0"), indirect=["adapted"]
)
def test_on_vulkan(adapted: Adapted, devices: list[str]) -> None:
    adapted.check(devices)


def test_on_a_quantized_base(tmp_path: Path, dense: Adapted) -> None:
    """In a Q8_0 model, unused adapters change nothing. Logits with adapters differ from the merged model's
    logits only by the rounding of Q8_0."""
    path = write(dense.fixture, tmp_path / "q8.gguf", quantize=True)
    logits = []
    for lora, choice in (((), ()), (dense.files, ()), (dense.files, CHOICES[3])):
        runner = load_runner(path, devices=["numpy"], **{**OPTIONS, "lora": lora})
        logits.append(runner.step(PROMPT[:N], [Run(0, 0, N, 0, adapters=choice)], range(N)).copy())
        runner.close()
    base, unused, used = logits
    assert np.array_equal(base, unused)
    assert nmse(base, dense.want[0]) < 1e-3 < 0.1 < nmse(used, base)
    assert nmse(used, dense.want[3]) < 1e-3  # the error of rounding the base model to 8 bits


@pytest.mark.no_vulkan
def test_halves_of_a_step(dense: Adapted) -> None:
    """If the rows are computed in two halves, each half has separate adapter ids."""
    runs = [Run(0, 0, 40, 0, adapters=CHOICES[1]), Run(1, 40, 24, 0, adapters=CHOICES[3])]
    tokens = PROMPT[:40] + PROMPT[:24]
    logits = []
    for interleave in (False, True):
        runner = dense.open(["numpy"] * 2, interleave=interleave)
        logits.append(runner.step(tokens, runs, [39, 63] if not interleave else [63]).copy())
        kinds = list(runner.mesh.steps.by_kind)
        assert [kind.halves for kind in kinds] == [interleave] and kinds[0].adapters == 2
        runner.close()
    assert nmse(logits[1], logits[0][1:]) <= BOUND


@pytest.mark.no_vulkan
@pytest.mark.parametrize("name", [wide(pytest.param(name, id=name)) for name in FIXTURES])
def test_every_architecture(name: str, tmp_path: Path) -> None:
    """Recurrent layers and routers amplify the rounding of sums; kimi-k3 differs by 5e-10."""
    Adapted(name, ANY, tmp_path).check(["numpy"] * 2, 1e-9)


# ---- cost ----


@pytest.fixture(scope="module")
def plain_and_loaded(dense: Adapted) -> Iterator[tuple[Runner, Runner]]:
    runners = dense.open(["numpy"] * 2, lora=()), dense.open(["numpy"] * 2)
    yield runners
    for runner in runners:
        runner.close()


@pytest.mark.no_vulkan
@pytest.mark.parametrize("n_rows", [1, 64])
def test_a_step_without_adapters_has_the_commands_of_a_model_without_adapters(
    plain_and_loaded: tuple[Runner, Runner], n_rows: int
) -> None:
    kind = StepKind.of_run(n_rows, 1)
    plain, loaded = (runner.mesh.steps.builder.recorded(kind) for runner in plain_and_loaded)
    assert [form_of(r) for r in plain.recordings] == [form_of(r) for r in loaded.recordings]
    assert plain.meetings == loaded.meetings


@pytest.mark.no_vulkan
def test_what_adapters_add_to_a_step(plain_and_loaded: tuple[Runner, Runner]) -> None:
    """There is one additional dispatch for each adapted product, and one for each input of adapted products.
    Every exchange has the same size."""
    builder = plain_and_loaded[1].mesh.steps.builder
    kind = StepKind.of_run(1, 1)
    without, with_two = builder.recorded(kind), builder.recorded(kind._replace(adapters=2))
    assert with_two.meetings == without.meetings and without.meetings
    layers = plain_and_loaded[1].model.n_layer
    for old, new in zip(without.recordings, with_two.recordings, strict=True):
        ops = [c.op for c in new.accesses() if not isinstance(c, Copy)]
        products, inputs = 7 * layers + 1, 4 * layers + 1  # q, k and v have the same input; gate and up, too
        assert (ops.count("low_rank_add"), ops.count("mat_vec_id")) == (products, inputs)
        base = [c.op for c in old.accesses() if not isinstance(c, Copy)]
        # Gate, up and glu of a layer are one dispatch only without adapters.
        assert len(ops) == len(base) + products + inputs + 2 * layers
        copied = [sum(c.src.nbytes for c in r.accesses() if isinstance(c, Copy)) for r in (old, new)]
        # ids and scales, of the rows and of the output rows
        assert copied[1] - copied[0] == 4 * 2 * 2 * (1 + 1)


@pytest.mark.no_vulkan
@pytest.mark.parametrize(
    ("adapted", "n_rows"), only(product(MODELS, [1, 64]), "dense-1", "experts-64"), indirect=["adapted"]
)
def test_steps_have_no_hazards(adapted: Adapted, n_rows: int) -> None:
    runner = adapted.open(["numpy"] * 2, interleave=n_rows > 1)
    kind = StepKind.of_run(n_rows, 1, halves=n_rows > 1)._replace(adapters=2)
    step = runner.mesh.recorded_step(kind)
    for executable in step.executables:
        # low_rank_add writes each element of y that it has read.
        assert {hazard.kind for hazard in hazards.check(executable.recording)} <= {"in-place"}
    runner.close()


def test_a_step_records_once_and_allocates_nothing_later(dense: Adapted) -> None:
    runner = dense.open(["numpy"])
    for at, choice in enumerate((CHOICES[1], CHOICES[2], ((1, 3.0),), ((0, -1.0),))):
        runner.step([5], [Run(0, 0, 1, at, adapters=choice)], [0])
    assert runner.n_recorded == 1
    runner.close()
