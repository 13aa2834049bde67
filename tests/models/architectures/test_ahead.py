"""Multi-token prediction heads produce the golden logits of `oracles/make_heads.py`."""

from __future__ import annotations

import json
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from device_sets import DEVICE_SETS, nmse, only, product, some, wide
from exchanges import planned
from oracles.fixture import PROMPT, Fixture, write
from oracles.heads import HEADS, with_head, without_head
from places import DATA
from prefills import opened, prefill
from with_heads import OPTIONS, draft, file_with_head, opened_with_head

from vkbackend import hazards
from vkbackend.errors import UnsupportedModel
from vkbackend.meta.sizing import form_of
from vkbackend.meta.step_kind import StepKind, Wanted
from vkbackend.models.architectures.registry import ARCHITECTURES, load_model, model_class
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.gguf.reader import GGUF
from vkbackend.step import Mix, Run

EXACT = 1e-9  # Bound on the NMSE against the oracle. Lavapipe, SwiftShader and numpy reach 2e-13 to 9e-11.
N = len(PROMPT)
heads = pytest.mark.parametrize("name", HEADS)
ON_SEVERAL = [
    *(pytest.param(p.values[0], id=p.id, marks=p.marks) for p in DEVICE_SETS if p.id in ("0", "0,0")),
    pytest.param(["numpy"] * 3, id="numpy*3"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


def check_golden(runner: Runner, name: str) -> None:
    """Compare the head's logits after the last prompt tokens, and in a chain of drafts. The model then
    computes the drafted rows, which must replace the draft's K and V."""
    golden = np.load(DATA / "heads" / f"{name}.npz")
    first = N - len(golden["logits"])
    runner.step(PROMPT[:first], [Run(1, 0, first, 0)], [])
    got = []
    for at in range(first, N):
        got.append(draft(runner, [PROMPT[at]], [1], [at])[0])
        runner.step([PROMPT[at]], [Run(1, 0, 1, at)], [0])
    assert nmse(np.array(got), golden["logits"]) <= EXACT
    chain = [draft(runner, [int(t)], [1], [N + i])[0] for i, t in enumerate(golden["tokens"])]
    assert nmse(np.array(chain), golden["drafted"]) <= EXACT


QUICK = "qwen35-0", "glm4moe-0,0", "deepseek32-0", "nemotron_h_moe-numpy*3", "cohere2moe-numpy*3"


@pytest.mark.parametrize(("name", "devices"), only(product(HEADS, ON_SEVERAL), *QUICK))
def test_golden_heads(folder: Path, name: str, devices: list[str]) -> None:
    with opened_with_head(file_with_head(folder, name), devices, n_slots=2) as runner:
        check_golden(runner, name)


@pytest.mark.parametrize("name", only(HEADS, "glm4moe"))
@pytest.mark.parametrize(
    "how", [wide(pytest.param({"tensor_split": [5, 1]})), {"split_mode": "layer"}, {"n_gpu_layers": 1}]
)
def test_golden_heads_with_any_split(folder: Path, name: str, how: dict[str, object]) -> None:
    with opened_with_head(file_with_head(folder, name), ["numpy"] * 2, n_slots=2, **how) as runner:
        check_golden(runner, name)


@pytest.mark.parametrize("name", only(HEADS, "deepseek32"))
def test_a_head_costs_no_exchange_in_a_step_and_two_in_a_draft(folder: Path, name: str) -> None:
    with opened_with_head(file_with_head(folder, name), ["numpy"] * 2) as runner:
        plain = [r for r in runner.mesh.recorded_step(StepKind.of_run(4, 4)).reduces if r]
        kind = StepKind(1, 1, Mix.DECODE, Wanted(ahead=True))
        drafting = [r for r in runner.mesh.recorded_step(kind).reduces if r]
        wanted = planned(runner, 4)
        ahead = (
            planned(runner, 1)[-2:] if not getattr(runner.model, "parallel", False) else [runner.model.n_embd]
        )
        assert len(plain) == len(wanted) - len(ahead) and [r.elements for r in drafting] == ahead


@pytest.mark.parametrize("name", only(HEADS, "nemotron_h_moe"))
def test_steps_without_a_head_record_the_same(folder: Path, tmp_path: Path, name: str) -> None:
    bare = write(without_head(with_head(name)), tmp_path / "bare.gguf")
    forms = []
    for path in (file_with_head(folder, name), bare):
        with opened(path, ["numpy"] * 2, **OPTIONS) as runner:
            kinds = StepKind.of_run(1, 1), StepKind.of_run(48, 1)
            steps = [runner.mesh.recorded_step(kind) for kind in kinds]
            forms.append([form_of(e.recording) for step in steps for e in step.executables])
    assert forms[0] == forms[1]


@pytest.mark.parametrize("name", only(HEADS, "nemotron_h_moe"))
def test_a_head_does_not_change_the_logits(folder: Path, name: str) -> None:
    path = file_with_head(folder, name)
    logits = []
    for open_ in (opened_with_head, opened):
        with open_(path, ["numpy"] * 2, **OPTIONS) as runner:
            rows = [prefill(runner, PROMPT[:40])]
            if open_ is opened_with_head:
                draft(runner, [5], [0], [40])
            rows.append(prefill(runner, PROMPT[40:], first=40))
            logits.append(np.concatenate(rows))
    assert np.array_equal(*logits)


@pytest.mark.parametrize("name", ["glm4moe"])
def test_halves_hand_states_on(folder: Path, name: str) -> None:
    tokens, rows = (PROMPT * 2)[:80], []
    for interleave in (False, True):
        options = {"n_ctx": 128, "n_ubatch": 128, "interleave": interleave}
        with opened_with_head(file_with_head(folder, name), ["numpy"] * 2, **options) as runner:
            runner.step(tokens, [Run(0, 0, 80, 0)], [79])
            rows.append(draft(runner, [7], [0], [80]))
    assert nmse(rows[1], rows[0]) <= 1e-12


@pytest.mark.parametrize("name", only(HEADS, "qwen35"))
def test_random_drafts_leave_nothing(folder: Path, name: str) -> None:
    """Rejected rows and drafted rows do not change later drafts. Two sequences draft in one step."""
    rng = np.random.default_rng(3)
    path = file_with_head(folder, name)
    with opened_with_head(path, ["numpy"], n_slots=2, n_snapshots=4) as runner:
        for slot in (0, 1):
            runner.step(PROMPT[:9], [Run(slot, 0, 9, 0)], [])
        at = [9, 9]  # for each slot, the number of positions that are known to be right
        while min(at) < 30:
            slot, n = int(np.argmin(at)), int(rng.integers(1, 9))
            for i in range(int(rng.integers(0, 4))):
                draft(runner, rng.integers(0, 128, 2).tolist(), [0, 1], [p + i for p in at])
            right = min(int(rng.integers(1, n + 1)), N - at[slot])
            start = runner.resume_at(slot, at[slot])
            tokens = [*PROMPT[start : at[slot] + right], *rng.integers(0, 128, n - right).tolist()][:8]
            runner.step(tokens, [Run(slot, 0, len(tokens), start)], [])
            at[slot] = min(at[slot] + right, start + len(tokens))
        got = draft(runner, [9, 9], [0, 1], at)
    for slot, end in enumerate(at):
        with opened_with_head(path, ["numpy"]) as runner:
            runner.step(PROMPT[:end], [Run(0, 0, end, 0)], [])
            assert nmse(got[slot], draft(runner, [9], [0], [end])[0]) <= 1e-9


@pytest.mark.parametrize("name", only(HEADS, "glm4moe"))
def test_steps_with_heads_have_no_hazards(folder: Path, name: str) -> None:
    options = {"n_ctx": 128, "n_ubatch": 128, "n_slots": 4, "interleave": True}
    with opened_with_head(file_with_head(folder, name), ["numpy"] * 2, **options) as runner:
        kinds = [StepKind(n, n, Mix.DECODE, Wanted(ahead=True)) for n in (1, 4)]
        kinds += [StepKind.of_run(8, 8), StepKind.of_run(32, 1), StepKind(32, 4, Mix.BOTH)]
        for kind in [*kinds, StepKind.of_run(128, 1, halves=True)]:
            for executable in runner.mesh.recorded_step(kind).executables:
                kinds_of_hazards = {hazard.kind for hazard in hazards.check(executable.recording)}
                assert kinds_of_hazards <= {"in-place"}  # Some ops may write their result over their input.


def test_the_note_of_unused_tensors_names_the_flag(folder: Path) -> None:
    with opened(file_with_head(folder, "glm4moe"), ["numpy"], **OPTIONS) as runner:
        [note] = runner.notes
        assert note.endswith("; --spec-type draft-mtp uses them")
    with opened_with_head(file_with_head(folder, "glm4moe"), ["numpy"]) as runner:
        assert not runner.notes


def refused(fixture: Fixture, path: Path, words: str) -> None:
    with GGUF.open(write(fixture, path)) as gguf, pytest.raises(UnsupportedModel, match=words):
        load_model(gguf, with_heads=True)


def test_models_without_a_usable_head_are_refused(tmp_path: Path) -> None:
    m = with_head("glm4moe")
    refused(
        without_head(m), tmp_path / "a.gguf", r"no multi-token prediction head \(mtp\): glm4moe.nextn_pred"
    )
    two = deepcopy(m)
    two.keys["nextn_predict_layers"] = 2
    refused(two, tmp_path / "b.gguf", r"glm4moe.nextn_predict_layers = 2 is not supported with mtp")
    lacks = deepcopy(m)
    del lacks.tensors["blk.4.nextn.eh_proj.weight"]
    refused(lacks, tmp_path / "c.gguf", r"lacks its multi-token prediction head \(mtp\): blk.4.nextn.eh_proj")
    for m.arch in ("qwen3moe", "exaone4", "exaone-moe", "glm4"):
        words = rf"\(mtp\) are not supported for {m.arch}; supported are: .*glm4moe"
        refused(m, tmp_path / f"{m.arch}.gguf", words)


def test_every_architecture_with_heads_has_a_golden() -> None:
    able = {name for name in ARCHITECTURES if model_class(name).predicts_ahead}
    assert {name.split("+")[0] for name in HEADS} == able
    assert sorted(p.stem for p in (DATA / "heads").glob("*.npz")) == sorted(HEADS)


@pytest.mark.parametrize("name", some(HEADS, 11))
def test_a_head_counts_only_if_asked_for(folder: Path, name: str) -> None:
    held = []
    for open_ in (opened, opened_with_head):
        with open_(file_with_head(folder, name), ["numpy"], **OPTIONS) as runner:
            held.append(sum(row["weights"] + row["kv"] for row in runner.memory()))
            layers = runner.layout.plans
            assert len(layers) == runner.model.n_layer
    assert held[1] > held[0]


@pytest.mark.oracle
@heads
def test_the_oracle_gives_the_same_again(name: str) -> None:
    if missing := [p for p in ("torch", "transformers") if find_spec(p) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    from oracles.make_heads import golden as ask

    logits, drafted, tokens = ask(name)
    kept = np.load(DATA / "heads" / f"{name}.npz")
    assert tokens == kept["tokens"].tolist(), json.loads(str(kept["about"]))
    assert nmse(logits, kept["logits"]) <= 1e-10 and nmse(drafted, kept["drafted"]) <= 1e-10
