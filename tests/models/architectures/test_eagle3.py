"""EAGLE-3 heads produce the logits of the float64 reference in `oracles/eagle.py`."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import llama_float64
import numpy as np
import pytest
from device_sets import DEVICE_SETS, nmse, product, some
from oracles.eagle import Reference, eagle3
from oracles.fixture import PROMPT, Fixture, write
from oracles.fixtures import build
from prefills import opened, prefill
from with_heads import OPTIONS, draft

from vkbackend import hazards
from vkbackend.errors import GGUFError, InvalidArgument, UnsupportedModel
from vkbackend.meta.step_kind import StepKind, Wanted
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.engine.runner.draft_runner import HeadRunner
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.placement.tensors import check_weights
from vkbackend.step import Mix, Run

EXACT = 1e-9  # Bound on the NMSE of f32 against f64. Lavapipe, SwiftShader and numpy reach 2e-13 to 9e-12.
N, N_DRAFTED = 40, 4
HEADS: dict[str, dict[str, Any]] = {
    "draft vocabulary": {},
    "shared tables": {"n_draft": 0, "tables": ()},
    "own tables": {"n_embd": 48, "tables": ("token_embd", "output"), "norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True, "states": [4, 0, 3]},
}


def llama() -> Fixture:
    """Return a model whose hidden states llama_float64 can compute."""
    m = build("llama")
    del m.tensors["rope_freqs.weight"]
    return m


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eagle3")
    write(llama(), path / "llama.gguf")
    for name, how in HEADS.items():
        write(eagle3(llama(), **how), path / f"{name}.gguf")
    return path


def opened_with(folder: Path, name: str, devices: list[str], **options: Any) -> Any:
    given = OPTIONS | {"draft": folder / f"{name}.gguf", "type_k": "f32", "type_v": "f32"} | options
    return opened(folder / "llama.gguf", devices, **given)


def expected(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return the logits after each token except the first, and the logits and tokens of a chain of drafts."""
    head, states = Reference(eagle3(llama(), **HEADS[name]), llama()), list[np.ndarray]()
    logits = llama_float64.forward(folder / "llama.gguf", PROMPT[:N], states=states)
    g = head.fused(np.concatenate([states[il] for il in head.m.keys["target_layers"]], -1))
    rows = [head.row(PROMPT[p + 1], g[p])[0] for p in range(N - 1)]
    before, tokens, drafted = g[-1], [int(logits[-1].argmax())], []
    for _ in range(N_DRAFTED):
        row, before = head.row(tokens[-1], before)
        drafted.append(row)
        best = int(row.argmax())
        tokens.append(int(head.m["d2t"][best]) if "d2t" in head.m.tensors else best)
    return np.array(rows), np.array(drafted), tokens


def check(folder: Path, name: str, devices: list[str], **options: Any) -> None:
    """Compute a prompt in steps of several sizes. Compare the draft after every token, and a chain of
    drafts."""
    logits, drafted, tokens = expected(folder, name)
    with opened_with(folder, name, devices, n_slots=2, **options) as runner:
        got, at = [], 0
        for n in (1, 8, 3, 1, 1, 26):
            runner.step(PROMPT[at : at + n], [Run(1, 0, n, at)], [])
            at += n
            if at < N:
                got.append(draft(runner, [PROMPT[at]], [1], [at])[0])
        assert at == N
        ends = np.cumsum((1, 8, 3, 1, 1)) - 1
        assert nmse(np.array(got), logits[ends]) <= EXACT
        chain = [draft(runner, [t], [1], [N + i])[0] for i, t in enumerate(tokens[:-1])]
        assert nmse(np.array(chain), drafted) <= EXACT
        best, chances = HeadRunner(runner).draft([tokens[0]], [1], [N], summed=True)
        p = np.exp(drafted[0] - drafted[0].max())
        assert best[0] == tokens[1] and chances is not None
        assert chances[0] == pytest.approx(p.max() / p.sum(), rel=1e-4)


ON_SEVERAL = [
    *(pytest.param(p.values[0], id=p.id, marks=p.marks) for p in DEVICE_SETS if p.id in ("0", "0,0")),
    pytest.param(["numpy"] * 3, id="numpy*3"),
]


@pytest.mark.parametrize(("name", "devices"), some(product(HEADS, ON_SEVERAL), 12))
def test_logits(folder: Path, name: str, devices: list[str]) -> None:
    check(folder, name, devices)


@pytest.mark.wide
@pytest.mark.parametrize("how", [{"tensor_split": [5, 1]}, {"split_mode": "layer"}, {"n_gpu_layers": 1}])
def test_logits_with_any_split(folder: Path, how: dict[str, object]) -> None:
    check(folder, "draft vocabulary", ["numpy"] * 2, **how)
    check(folder, "shared tables", ["numpy"] * 2, **how)


def test_a_head_costs_no_exchange_in_a_step_and_two_in_a_draft(folder: Path) -> None:
    with opened_with(folder, "draft vocabulary", ["numpy"] * 2) as runner:
        step = runner.mesh.recorded_step(StepKind.of_run(4, 4))
        assert len([r for r in step.reduces if r]) == 2 * 4
        drafting = runner.mesh.recorded_step(StepKind(1, 1, Mix.DECODE, Wanted(ahead=True)))
        assert [r.elements for r in drafting.reduces if r] == [64, 64]


@pytest.mark.wide
def test_a_head_does_not_change_the_logits(folder: Path) -> None:
    logits = []
    for with_head in (True, False):
        devices = ["numpy"] * 2
        how = opened_with(folder, "draft vocabulary", devices) if with_head else None
        with how or opened(folder / "llama.gguf", devices, **OPTIONS) as runner:
            rows = [prefill(runner, PROMPT[:40])]
            if with_head:
                draft(runner, [5], [0], [40])
            rows.append(prefill(runner, PROMPT[40:], first=40))
            logits.append(np.concatenate(rows))
    assert np.array_equal(*logits)


@pytest.mark.wide
def test_halves_hand_states_on(folder: Path) -> None:
    tokens, rows = (PROMPT * 2)[:80], []
    for interleave in (False, True):
        options = {"n_ctx": 128, "n_ubatch": 128, "interleave": interleave}
        with opened_with(folder, "draft vocabulary", ["numpy"] * 2, **options) as runner:
            runner.step(tokens, [Run(0, 0, 80, 0)], [79])
            rows.append(draft(runner, [7], [0], [80]))
    assert nmse(rows[1], rows[0]) <= 1e-12


@pytest.mark.wide
def test_layers_are_repeated_around_the_inputs_that_are_kept(tmp_path: Path) -> None:
    """Of 24 equal layers, most are recorded once. Layers whose inputs are kept are recorded separately."""
    m = deep(24)
    path, head = write(m, tmp_path / "m.gguf"), write(eagle3(m, states=[2, 12, 21]), tmp_path / "h.gguf")
    rows = []
    for keeps in (False, True):  # these values can be read only if all layers are recorded
        with opened(path, ["numpy"] * 2, **OPTIONS, draft=head, keep_values=keeps) as runner:
            runner.step(PROMPT[:9], [Run(0, 0, 9, 0)], [8])
            rows.append(draft(runner, [7], [0], [9]))
            step = runner.mesh.recorded_step(StepKind.of_run(1, 1))
            [repeats] = {len(getattr(e.recording, "repeats", ())) for e in step.executables}
            assert repeats == 0 if keeps else repeats > 0
    assert np.array_equal(*rows)


def deep(n_layer: int) -> Fixture:
    m = llama()
    layers = {name: values for name, values in m.tensors.items() if name.startswith("blk.0.")}
    m.keys["block_count"] = n_layer
    for il in range(n_layer):
        for name, values in layers.items():
            rng = np.random.default_rng(il)
            shuffled = rng.permutation(values.reshape(-1)).reshape(values.shape)
            m.tensors[name.replace("blk.0.", f"blk.{il}.")] = 0.3 * shuffled
    return m


@pytest.mark.wide
def test_random_drafts_leave_nothing(folder: Path) -> None:
    """Rejected rows and drafted rows do not change later drafts. Two sequences draft in one step."""
    rng = np.random.default_rng(3)
    with opened_with(folder, "draft vocabulary", ["numpy"], n_slots=2) as runner:
        for slot in (0, 1):
            runner.step(PROMPT[:9], [Run(slot, 0, 9, 0)], [])
        at = [9, 9]  # for each slot, the number of positions that are known to be right
        while min(at) < 30:
            slot, n = int(np.argmin(at)), int(rng.integers(1, 9))
            for i in range(int(rng.integers(0, 4))):
                draft(runner, rng.integers(0, 128, 2).tolist(), [0, 1], [p + i for p in at])
            right = int(rng.integers(1, n + 1))
            tokens = [*PROMPT[at[slot] : at[slot] + right], *rng.integers(0, 128, n - right).tolist()]
            runner.step(tokens, [Run(slot, 0, n, at[slot])], [])
            at[slot] += right
        got = draft(runner, [9, 9], [0, 1], at)
    for slot, end in enumerate(at):
        with opened_with(folder, "draft vocabulary", ["numpy"]) as runner:
            runner.step(PROMPT[:end], [Run(0, 0, end, 0)], [])
            assert nmse(got[slot], draft(runner, [9], [0], [end])[0]) <= 1e-9


@pytest.mark.wide
def test_steps_have_no_hazards(folder: Path) -> None:
    options = {"n_ctx": 128, "n_ubatch": 128, "n_slots": 4, "interleave": True}
    with opened_with(folder, "norm before fc", ["numpy"] * 2, **options) as runner:
        kinds = [StepKind(n, n, Mix.DECODE, Wanted(ahead=True)) for n in (1, 4)]
        kinds += [StepKind.of_run(8, 8), StepKind.of_run(32, 1), StepKind(32, 4, Mix.BOTH)]
        for kind in [*kinds, StepKind.of_run(128, 1, halves=True)]:
            for executable in runner.mesh.recorded_step(kind).executables:
                kinds_of_hazards = {hazard.kind for hazard in hazards.check(executable.recording)}
                assert kinds_of_hazards <= {"in-place"}  # Some ops may write their result over their input.


OTHER_TARGET = [
    ({"target_hidden_size": 128}, "target_hidden_size is 128, but the model's embedding_length is 64"),
    ({"target_layers": [1, 2, 5]}, r"eagle3.target_layers is \[1, 2, 5\], expected 3 layers of 0..4"),
    ({"target_layers": [1, 2]}, r"eagle3.target_layers is \[1, 2\], expected 3 layers"),
    ({"block_count": 2}, "eagle3.block_count is 2; 1 is supported"),
]


def refused(head: Fixture, folder: Path, words: str, error: type[Exception] = UnsupportedModel) -> None:
    path = write(head, folder / "refused.gguf")
    with GGUF.open(folder / "llama.gguf") as gguf, pytest.raises(error, match=words) as raised:
        check_weights(gguf, load_model(gguf, head=str(path)))
    assert "refused.gguf" in str(raised.value)


@pytest.mark.no_vulkan
def test_heads_of_other_targets_are_refused(folder: Path) -> None:
    for keys, words in OTHER_TARGET:
        refused(eagle3(llama(), **keys), folder, words)
    m = eagle3(llama())
    m.tensors["d2t"][-1] = 128
    refused(m, folder, r"the 96 tokens of d2t are 0..128, but the model has 0..127")
    m.tensors["d2t"] = m["d2t"].astype(np.int32)
    refused(m, folder, "d2t is i32 of shape", GGUFError)
    refused(
        eagle3(llama(), n_embd=48),
        folder,
        "token_embd.weight is missing, and the model's has 64 columns, not 48",
    )
    refused(eagle3(llama(), tables=()), folder, "d2t has 96 tokens, but output.weight is missing", GGUFError)
    words = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(200)]}
    refused(
        eagle3(llama(), **words), folder, "its vocabulary is not the model's: the sizes are", InvalidArgument
    )


@pytest.mark.no_vulkan
def test_damaged_heads_are_refused(folder: Path) -> None:
    for name in ("fc.weight", "output_norm.weight", "blk.0.attn_norm_2.weight"):
        m = deepcopy(eagle3(llama()))
        del m.tensors[name]
        refused(m, folder, f"the tensor '{name}' is missing", GGUFError)
    m = eagle3(llama())
    m.put("t2d.weight", np.zeros((2, 2)))
    refused(m, folder, "1 tensors that eagle3 does not use: t2d.weight")
    m = eagle3(llama())
    m.tensors["fc.weight"] = m["fc.weight"][:, :-32]
    refused(m, folder, r"fc.weight has shape \(64, 160\), expected \(64, 192\)", GGUFError)


@pytest.mark.no_vulkan
def test_a_head_alone_is_no_model(folder: Path) -> None:
    with (
        GGUF.open(folder / "draft vocabulary.gguf") as gguf,
        pytest.raises(UnsupportedModel, match="give the model with -m and the head with -md"),
    ):
        load_model(gguf)
    with (
        GGUF.open(folder / "llama.gguf") as gguf,
        pytest.raises(UnsupportedModel, match="architecture 'llama' is not an EAGLE-3 head"),
    ):
        load_model(gguf, head=str(folder / "llama.gguf"))


@pytest.mark.wide
@pytest.mark.parametrize(
    "name", ["gemma3n", "gpt2", "gemma4", "qwen35", "qwen3next", "lfm2", "mamba2", "nemotron_h"]
)
def test_other_architectures(tmp_path: Path, name: str) -> None:
    """gemma3n is refused, because of its streams. With all other models, drafts on two devices equal drafts
    on one device."""
    m = build(name)
    path, head = (
        write(m, tmp_path / "m.gguf"),
        write(eagle3(m, states=[0, 1, m.n_layer]), tmp_path / "h.gguf"),
    )
    rows = []
    for n in (1, 2):
        if name == "gemma3n":
            with pytest.raises(UnsupportedModel, match="EAGLE-3 does not support gemma3n models"):
                opened(path, ["numpy"], **OPTIONS, draft=head).__enter__()
            return
        with opened(path, ["numpy"] * n, **OPTIONS, draft=head) as runner:
            runner.step(PROMPT[:9], [Run(0, 0, 9, 0)], [8])
            rows.append(draft(runner, [7], [0], [9]))
    assert nmse(rows[1], rows[0]) <= 1e-9
