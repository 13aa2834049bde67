"""Threads of one process act as several nodes. A single node with all devices computes the expected results.

The file is long because all tests share the same groups of nodes and their models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import DENSE, EXPERTS, random_pairs, write_adapter
from control_vectors import write_vectors
from device_sets import covering, wide
from drafts import Guesses
from oracles import encoders
from oracles.eagle import eagle3
from oracles.fixture import write
from oracles.fixtures import build
from oracles.heads import with_head
from runners import load_runner
from safetensors import safe_open
from scheduling import GREEDY, Everything, drafting, events_of, finish
from scheduling import tokens_of as tokens_in
from tiny_models import Tiny, write_tiny

from vkbackend.errors import DeviceLost, InvalidArgument, OutOfDeviceMemory, PlanError
from vkbackend.limits import Limits
from vkbackend.meta import reduce as reduces
from vkbackend.meta.elsewhere import Card, Elsewhere
from vkbackend.models.drafting.drafter import Want
from vkbackend.models.engine.cache.blocks import SlotContent
from vkbackend.models.engine.drafters import drafters_of, open_draft
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import CopySlot, Generate
from vkbackend.models.engine.runner import loading, saved_state
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.fitting import fitter
from vkbackend.models.hosts.group import Group
from vkbackend.models.hosts.joining import place_of
from vkbackend.models.options import Options
from vkbackend.models.placement import fit
from vkbackend.models.placement.host_limits import HostLimit
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.step import Run
from vkbackend.tools.measure.twin_nodes import twin_runner
from vkbackend.twins.device import NumpyDevice

pytestmark = pytest.mark.no_vulkan

TOKENS = np.random.default_rng(3).integers(3, 120, 300).tolist()
OPTIONS: dict[str, Any] = {"n_ctx": 192, "n_slots": 2, "n_ubatch": 128, "reduce_type": "f32"}


def here(places: list[str]) -> list[str]:
    return [place.partition("/")[2] for place in places]


def logits_of_two_slots(runner: Runner) -> np.ndarray:
    """Return the logits of four steps: the first computes two prompts, two steps continue both, and the last
    continues one."""
    out = [runner.step(TOKENS[:80], [Run(0, 0, 50, 0), Run(1, 50, 30, 0)], [49, 79]).copy()]
    for i in range(2):
        runs = [Run(0, 0, 1, 50 + i), Run(1, 1, 1, 30 + i)]
        out.append(runner.step(TOKENS[80 + i : 82 + i], runs, [0, 1]).copy())
    out.append(runner.step([7], [Run(1, 0, 1, 32)], [0]).copy())
    return np.concatenate(out)


def check(path: Path, places: list[str], interleave: bool = False, **options: Any) -> None:
    """Check that several nodes produce the same logits as a single node. If `interleave` is true, a step
    computes its rows in two halves."""
    options = OPTIONS | options
    # a split by layers depends on hosts, so this single node pretends to be several
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Options, "nodes", tuple(place[0] for place in places))
        single = load_runner(path, devices=here(places), interleave=interleave, **options)
    want = logits_of_two_slots(single)
    single.close()
    n_hosts = 1 + max(int(place[0]) for place in places)
    with twin_runner(path, places, n_hosts, interleave, **options) as runner:
        assert np.array_equal(logits_of_two_slots(runner), want) and np.isfinite(want).all()


TWO, THREE = ["0/numpy", "1/numpy"], ["0/numpy", "1/numpy", "1/numpy"]
FOUR, HOSTS = ["0/numpy", "0/numpy", "1/numpy", "1/numpy"], ["0/numpy", "1/numpy", "2/numpy"]


@pytest.mark.parametrize(
    ("name", "places", "options"),
    [
        pytest.param("llama", TWO, {}, marks=pytest.mark.wide),
        ("llama", THREE, {"tensor_split": [1, 5, 2], "reduce_provider": "host-sum"}),
        wide(pytest.param("llama", ["1/numpy", "0/numpy", "2/numpy"], {"tensor_split": [3, 0, 2]})),
        pytest.param("llama", TWO, {"interleave": True}, marks=pytest.mark.wide),
        pytest.param("llama", TWO, {"reduce_type": "bf16"}, marks=pytest.mark.wide),
        wide(pytest.param("llama", THREE, {"reduce_type": "f16", "reduce_provider": "scatter"})),
        pytest.param("llama", [*TWO, "2/numpy"], {"split_mode": "layer"}, marks=pytest.mark.wide),
        pytest.param("qwen3moe", THREE, {}, marks=pytest.mark.wide),
        wide(pytest.param("qwen3moe", TWO, {"split_mode": "layer", "reduce_provider": "host-sum"})),
        pytest.param("qwen35", TWO, {}, marks=pytest.mark.wide),
        ("llama", FOUR, {"split_mode": "hosts", "tensor_split": [1, 2, 3, 1]}),
        wide(pytest.param("qwen3moe", THREE, {"split_mode": "hosts", "reduce_provider": "host-sum"})),
        pytest.param("qwen35", [*FOUR, "2/numpy"], {"split_mode": "hosts"}, marks=pytest.mark.wide),
        pytest.param("gpt-oss", [*THREE, "0/numpy"], {"reduce_provider": "scatter"}, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_logits_equal_one_host(tmp_path: Path, name: str, places: list[str], options: Any) -> None:
    check(write(build(name), tmp_path / "model.gguf"), places, **options)


@pytest.mark.parametrize(
    ("places", "options"),
    [
        wide(pytest.param(FOUR, {})),
        wide(pytest.param(FOUR, {"reduce_provider": "host-sum", "reduce_type": "bf16"})),
        (HOSTS, {"reduce_provider": "host-sum", "tensor_split": [1, 3, 2], "interleave": True}),
        wide(pytest.param([*THREE, "2/numpy"], {"reduce_provider": "host-sum", "reduce_type": "f16"})),
        wide(pytest.param(FOUR, {"split_mode": "hosts", "reduce_provider": "scatter"})),
    ],
    ids=str,
)
def test_large_sums_are_scattered_over_hosts(
    tmp_path: Path, places: list[str], options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduces, "SCATTER_NBYTES", 1 << 12)
    check(write_tiny(tmp_path / "model.gguf", Tiny("llama", n_layer=2)), places, **options)


@pytest.mark.parametrize(
    ("name", "places"),
    covering(
        ["llama", "nomic-bert-moe"],
        [pytest.param(p, id=str(p)) for p in (TWO, ["1/numpy", "0/numpy", "1/numpy"])],
    ),
)
def test_hidden_states(tmp_path: Path, name: str, places: list[str]) -> None:
    fixture = build(name) if name == "llama" else encoders.build(name)
    path = write(fixture, tmp_path / "model.gguf")
    rows = TOKENS[:13], [Run(0, 0, 9, 0), Run(1, 9, 4, 0)], [0, 4, 8, 12]
    single = load_runner(path, devices=here(places), interleave=False, **OPTIONS)
    want = single.step_hidden(*rows)
    single.close()
    with twin_runner(path, places, 2, False, **OPTIONS) as runner:
        assert np.array_equal(runner.step_hidden(*rows), want) and np.isfinite(want).all()


def test_rows_of_cos_and_sin_of_host_0_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hashes of the nodes' tables differ, so node 0 sends its rows of cos and sin."""
    path = write(build("llama"), tmp_path / "model.gguf")
    with monkeypatch.context() as patch:
        from vkbackend.models.hosts import joining

        numbers = iter(range(100))
        patch.setattr(joining, "tables_hash", lambda *_: str(next(numbers)))
        sent: list[Any] = []
        real = Group.step
        patch.setattr(Group, "step", lambda self, *args: (sent.append(args[-1]), real(self, *args))[1])
        check(path, TWO, interleave=True)
    assert sent and all(tables is not None for tables in sent)


@pytest.mark.parametrize(
    ("places", "options"),
    [(TWO, {}), wide(pytest.param(FOUR, {"split_mode": "hosts"}))],
    ids=str,
)
def test_a_head_drafts_over_nodes(tmp_path: Path, places: list[str], options: dict[str, Any]) -> None:
    path = write(with_head("glm4moe"), tmp_path / "model.gguf")
    options = OPTIONS | {"speculation": "mtp"} | options
    drafts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Options, "nodes", tuple(place[0] for place in places))
        single = load_runner(path, devices=here(places), **options)
    with twin_runner(path, places, 2, **options) as several:
        for runner in (single, several):
            runner.step(TOKENS[:12], [Run(0, 0, 7, 0), Run(1, 7, 5, 0)], [])
            first = runner.draft(TOKENS[20:22], [0, 1], [7, 5], summed=True)
            drafts.append((*first, *runner.draft(first[0].tolist(), [0, 1], [8, 6], summed=True)))
    single.close()
    assert all(np.array_equal(*pair) for pair in zip(*drafts, strict=True))


@pytest.mark.wide
@pytest.mark.parametrize("split_mode", ["tensor", "layer"])
def test_an_eagle3_head(tmp_path: Path, split_mode: str) -> None:
    """Node 1 reads the head from a file next to its copy of the model. Node 0 maps drafted rows to tokens."""
    target = build("llama")
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        write(target, folder / "model.gguf")
        write(eagle3(target), folder / "head.gguf")
    path, there = tmp_path / "a" / "model.gguf", str(tmp_path / "b" / "model.gguf")
    options = OPTIONS | {"draft": path.with_name("head.gguf"), "split_mode": split_mode}
    drafts = []
    single = load_runner(path, devices=here(TWO), **options)
    with twin_runner(path, TWO, models=[None, there], **options) as several:
        for runner in (single, several):
            runner.step(TOKENS[:7], [Run(0, 0, 7, 0)], [])
            first = runner.draft(TOKENS[20:21], [0], [7], summed=True)
            drafts.append((*first, *runner.draft(first[0].tolist(), [0], [8], summed=True)))
    single.close()
    assert all(np.array_equal(*pair) for pair in zip(*drafts, strict=True))


@pytest.mark.parametrize("split_mode", ["tensor", wide(pytest.param("layer", id="layer"))])
def test_control_vectors(tmp_path: Path, split_mode: str) -> None:
    """Node 1 reads the control vectors from a file next to its copy of the model."""
    tiny, rng = Tiny("llama", n_layer=3), np.random.default_rng(0)
    vectors = {il: rng.normal(size=tiny.n_embd).astype(np.float32) for il in (1, 2)}
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        write_tiny(folder / "model.gguf", tiny)
        write_vectors(folder / "vectors.gguf", vectors)
    path, there = tmp_path / "a" / "model.gguf", str(tmp_path / "b" / "model.gguf")
    steered = OPTIONS | {"control_vectors": [(path.with_name("vectors.gguf"), 2.0)], "split_mode": split_mode}
    results = []
    for options in (OPTIONS, steered):
        single = load_runner(path, devices=here(TWO), **options)
        results.append(logits_of_two_slots(single))
        single.close()
    with twin_runner(path, TWO, models=[None, there], **steered) as runner:
        assert np.array_equal(logits_of_two_slots(runner), results[1]) and not np.array_equal(*results)


@pytest.mark.parametrize("split_mode", ["tensor", wide(pytest.param("layer", id="layer"))])
def test_adapters(tmp_path: Path, split_mode: str) -> None:
    """Node 1 reads the adapters from files next to its copy of the model. The rows' adapters are part of
    every step."""
    fixture = build("qwen3moe")
    pairs = [random_pairs(fixture, rank, f"{DENSE}|{EXPERTS}") for rank in (2, 3)]
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        write(fixture, folder / "model.gguf")
        for i in range(2):
            write_adapter(folder / f"{i}.gguf", fixture.arch, pairs[i])
    path, there = tmp_path / "a" / "model.gguf", str(tmp_path / "b" / "model.gguf")
    adapted = OPTIONS | {"lora": [path.with_name(f"{i}.gguf") for i in range(2)], "split_mode": split_mode}

    def logits(runner: Runner) -> np.ndarray:
        runs = [Run(0, 0, 20, 0, adapters=((0, 1.0),)), Run(1, 20, 20, 0, adapters=((1, 0.5), (0, -1.0)))]
        out = [runner.step(TOKENS[:40], runs, [19, 39]).copy()]
        out.append(
            runner.step([7, 8], [Run(0, 0, 1, 20, adapters=((0, 1.0),)), Run(1, 1, 1, 20)], [0, 1]).copy()
        )
        return np.concatenate(out)

    single = load_runner(path, devices=here(TWO), **adapted)
    want = logits(single)
    single.close()
    with twin_runner(path, TWO, models=[None, there], **adapted) as runner:
        assert np.array_equal(logits(runner), want) and np.isfinite(want).all()
    write_adapter(tmp_path / "b" / "1.gguf", fixture.arch, pairs[1], alpha=1.0)
    with pytest.raises(PlanError, match="differs in its model"):
        with twin_runner(path, TWO, models=[None, there], **adapted):
            pass


def test_candidates_masks_and_sums(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model.gguf", Tiny("llama", n_vocab=5000, n_layer=1))
    masks = np.random.default_rng(0).integers(0, 1 << 32, (2, -(-5000 // 32)), np.uint32)

    def outputs(runner: Runner) -> list[np.ndarray]:
        assert runner.max_top_k
        runs = [Run(0, 0, 3, 0), Run(1, 3, 1, 0)]
        out = [*runner.step_top_k([5, 6, 7, 8], runs, [2, 3], 40, masks, True)]
        out += runner.step_top_k([5, 6, 7, 8], runs, [2, 3], 1)[:2]
        return [np.array(array) for array in out]

    single = load_runner(path, devices=here(THREE), **OPTIONS)
    want = outputs(single)
    single.close()
    with twin_runner(path, THREE, **OPTIONS) as runner:
        assert all(np.array_equal(a, b) for a, b in zip(outputs(runner), want, strict=True))


@pytest.mark.parametrize("name", ["gemma3", "qwen35"])
@pytest.mark.wide
def test_states_move_from_two_hosts_to_one_and_back(tmp_path: Path, name: str) -> None:
    path = write(build(name), tmp_path / "model.gguf")
    content = SlotContent(TOKENS[:50], 50)
    files = [tmp_path / "hosts", tmp_path / "one"]

    def after_loading(runner: Runner) -> np.ndarray:
        loaded = SlotContent()
        saved_state.load(runner, files[0], 1, loaded)
        assert loaded.tokens == content.tokens
        return runner.step([9], [Run(1, 0, 1, 50)], [0]).copy()

    with twin_runner(path, THREE, **OPTIONS) as runner:
        runner.step(TOKENS[:50], [Run(0, 0, 50, 0)], [49])
        saved_state.save(runner, files[0], 0, content, 0, None)
        want = runner.step([9], [Run(0, 0, 1, 50)], [0]).copy()
    with twin_runner(path, THREE, **OPTIONS) as runner:
        assert np.array_equal(after_loading(runner), want)
    single = load_runner(path, devices=here(THREE), **OPTIONS)
    single.step(TOKENS[:50], [Run(0, 0, 50, 0)], [49])
    saved_state.save(single, files[1], 0, content, 0, None)
    assert np.array_equal(after_loading(single), want)
    single.close()
    with safe_open(files[0], "numpy") as saved, safe_open(files[1], "numpy") as usual:
        assert saved.metadata() == usual.metadata()  # including all checksums


FITTED = (
    *("n_ctx", "kv_cells", "n_slots", "type_k", "type_v", "tensor_split", "n_gpu_layers", "override_tensor"),
    "moe_cache_mib",
)


@pytest.mark.parametrize(
    ("name", "kib", "n_ctx", "n_layers", "cached"),
    [
        ("llama", 420, 64, None, False),
        wide(pytest.param("llama", 320, 64, 3, False)),
        wide(pytest.param("qwen3moe", 400, 256, None, True)),
    ],
    ids=str,
)
def test_fit_to_the_devices_of_two_hosts(
    tmp_path: Path, name: str, kib: int, n_ctx: int, n_layers: int, cached: bool, monkeypatch: Any
) -> None:
    """Node 0 fits the model to the memory of all nodes' devices. The others load the same."""

    def budgets(devices: Any) -> list[fit.Budget]:
        return [fit.Budget(f"device {d}", kib << 10, (d,)) for d in range(len(devices))]

    for module in (fit, loading, fitter):
        monkeypatch.setattr(module, "budgets_of", budgets)
    path = write(build(name), tmp_path / "model.gguf")
    given = {key: value for key, value in OPTIONS.items() if key != "n_ctx"}
    options = given | {"fit": FITTED, "fit_target": [0.0], "fit_ctx": 64}
    single = load_runner(path, devices=here(THREE), interleave=False, **options)
    step = TOKENS[:40], [Run(0, 0, 40, 0)], [39]
    want, logits = single.options, single.step(*step).copy()
    single.close()
    with twin_runner(path, THREE, **options) as runner:
        assert np.array_equal(runner.step(*step), logits)
        got = runner.options
    assert (got.n_ctx, got.n_gpu_layers, bool(got.moe_cache_mib)) == (n_ctx, n_layers, cached)
    assert [getattr(got, field) for field in FITTED] == [getattr(want, field) for field in FITTED]


@pytest.mark.parametrize("name", ["llama", *(wide(pytest.param(n, id=n)) for n in ("qwen35", "gpt-oss"))])
@pytest.mark.parametrize("split_mode", ["tensor", wide(pytest.param("layer", id="layer"))])
def test_kept_blocks_of_two_hosts(tmp_path: Path, name: str, split_mode: str) -> None:
    """Node 0 keeps the blocks of all nodes' devices, which later nodes or a single node restore."""
    path = write(build(name), tmp_path / "model.gguf")
    options = OPTIONS | {"cache_disk": tmp_path / "kv", "split_mode": split_mode}

    def answer(runner: Runner) -> tuple[list[int], int]:
        engine, out = Engine(runner), list[int]()
        engine.submit(Generate(1, tuple(TOKENS[:100]), 6, SamplingParams(temperature=0)))
        while engine.busy:
            for event in events_of(engine.step()):
                assert event.error is None, event.error
                out += [] if event.token is None else [event.token]
        n_restored = engine.stats()["n_blocks_restored"]
        engine.close()
        return out, int(n_restored)

    with twin_runner(path, THREE, **options) as runner:
        tokens, n_restored = answer(runner)
    assert n_restored == 0 and len(tokens) == 6
    with twin_runner(path, THREE, **options) as runner:
        assert answer(runner) == (tokens, 3)
    single = load_runner(path, devices=here(THREE), **options)
    assert answer(single) == (tokens, 3)


def tokens_of(runner: Runner) -> list[list[int]]:
    """Return the tokens of requests that share a prefix, and of a request on a copied slot."""
    engine = Engine(runner)
    out: dict[int, list[int]] = {}

    def run(*requests: Any) -> None:
        for request in requests:
            engine.submit(request)
        while engine.busy:
            for event in events_of(engine.step()):
                assert event.error is None, event.error
                out.setdefault(event.id, []).extend([] if event.token is None else [event.token])

    greedy = SamplingParams(temperature=0)
    run(Generate(1, tuple(TOKENS[:70]), 6, greedy))
    run(Generate(2, (*TOKENS[:66], 5), 6, greedy), Generate(3, tuple(TOKENS[:70]), 6, greedy))
    run(CopySlot(4, 0, 1))
    run(Generate(5, (*TOKENS[:70], 5, 6), 6, greedy, slot=1))
    assert runner.states or engine.stats()["prompt_tokens_cached"] >= 64
    engine.close()
    return [out[id_] for id_ in (1, 2, 3, 5)]


@pytest.mark.wide
@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_shared_prefixes_and_copied_slots(tmp_path: Path, name: str) -> None:
    path = write(build(name), tmp_path / "model.gguf")
    single = load_runner(path, devices=here(TWO), **OPTIONS)
    want = tokens_of(single)
    with twin_runner(path, TWO, **OPTIONS) as runner:
        assert tokens_of(runner) == want


@pytest.mark.parametrize("split_mode", ["tensor", wide(pytest.param("layer", id="layer"))])
def test_context_shifts(tmp_path: Path, split_mode: str) -> None:
    path = write(build("llama"), tmp_path / "model.gguf")
    options = OPTIONS | {"split_mode": split_mode, "context_shift": True, "n_ctx": 40}

    def shifted_tokens(runner: Runner) -> list[int]:
        engine, out = Engine(runner), []
        engine.submit(Generate(1, tuple(TOKENS[:20]), 25, SamplingParams(temperature=0), n_keep=3))
        while engine.busy:
            for event in events_of(engine.step()):
                assert event.error is None, event.error
                out += [event.token]
        assert event.n_discarded
        engine.close()
        return out

    want = shifted_tokens(load_runner(path, devices=here(TWO), **options))
    with twin_runner(path, TWO, **options) as runner:
        assert shifted_tokens(runner) == want and len(want) == 25


def test_memory_of_all_devices(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model.gguf", Tiny("llama", n_layer=1))
    single = load_runner(path, devices=here(THREE), **OPTIONS)
    want = single.memory()
    single.close()
    with twin_runner(path, THREE, **OPTIONS) as runner:
        got = runner.memory()
    assert [row["device"] for row in got] == ["numpy", "node 1/numpy.0", "node 1/numpy.1"]
    for key in ("weights", "kv", "scratch"):
        assert [row[key] for row in got] == [row[key] for row in want]


def test_steady_state_allocates_nothing(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model.gguf", Tiny("llama", n_layer=1))
    with twin_runner(path, TWO, **OPTIONS) as runner:
        for at in range(2):
            runner.step([5], [Run(0, 0, 1, at)], [0])
        provider = runner.mesh.provider
        before = len(provider._exchanges), runner.n_recorded, [d.created for d in runner.mesh.devices]  # type: ignore
        for at in range(2, 6):
            runner.step([5], [Run(0, 0, 1, at)], [0])
        now = len(provider._exchanges), runner.n_recorded, [d.created for d in runner.mesh.devices]  # type: ignore
        assert now == before


def test_a_step_that_cannot_be_recorded_ends_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If recording fails on one node, the group cannot continue, because the other nodes have recorded the
    step."""
    path = write_tiny(tmp_path / "model.gguf", Tiny("llama", n_layer=1))

    def fail(kind: object) -> None:
        raise OutOfDeviceMemory("no memory for a step")

    with pytest.raises(DeviceLost, match="node 0 could not record a step: no memory"):
        with twin_runner(path, TWO, **OPTIONS) as runner:
            monkeypatch.setattr(runner.mesh.steps, "_record", fail)
            with pytest.raises(OutOfDeviceMemory):
                runner.step(TOKENS[:40], [Run(0, 0, 40, 0)], [39])
            runner.step([5], [Run(0, 0, 1, 0)], [0])


def test_drafts_over_two_nodes(tmp_path: Path) -> None:
    """Node 0 drafts, and records the steps that verify before the other node needs them. The recurrent layers
    of both nodes return to earlier states."""
    write(build("lfm2"), path := tmp_path / "model.gguf")
    requests = [Generate(i, tuple(TOKENS[i : 9 + i]), 20, GREEDY) for i in range(2)]
    texts = []
    with twin_runner(path, TWO, **OPTIONS, speculation="ngram") as runner:
        runner.record_decoding((2, 4, 8))
        for share in (None, 1.0, 0.5):
            done = texts[0] if texts else []
            prompts = [[*r.tokens, *t] for r, t in zip(requests, done, strict=False)]

            def truth(want: Want, prompts: list[list[int]] = prompts) -> list[int]:
                n = len(want.history)
                return next((text[n:] for text in prompts if text[:n] == list(want.history)), [])

            drafter = None if share is None else Guesses(truth, share, 1, 40)
            engine = Engine(runner, Everything(), drafting(runner, drafter))
            answers = finish(engine, requests)
            texts.append([tokens_in(answers[i]) for i in range(2)])
            assert drafter is None or drafter.n_accepted > 6
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.wide
def test_a_draft_model_of_node_0(tmp_path: Path) -> None:
    """The draft model is the same model on one device of node 0, so all drafts are right."""
    write(build("lfm2"), path := tmp_path / "model.gguf")
    request, texts = Generate(0, tuple(TOKENS[:9]), 30, GREEDY), []
    with twin_runner(path, TWO, **OPTIONS, draft=path) as runner:
        wanted = runner.options.of_draft
        assert wanted is not None and wanted.devices == ("numpy",)
        draft = open_draft(runner.options)
        drafters = drafters_of(runner, draft)
        for speculation in (None, drafting(runner, *drafters)):
            engine = Engine(runner, Everything(), speculation)
            texts.append(tokens_in(finish(engine, [request])[0]))
        assert engine.stats()["n_accepted"] == engine.stats()["n_drafted"] > 15
        drafters[0].close()
    assert texts[0] == texts[1]


# ---- refusals ----


def test_another_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both models have tensors of equal shapes, so only the handshake can distinguish them."""
    paths = [write_tiny(tmp_path / f"{seed}.gguf", Tiny("llama", n_layer=1, seed=seed)) for seed in (0, 1)]
    with (
        pytest.raises(PlanError, match="node 1 differs in its model"),
        twin_runner(paths[0], TWO, models=[None, str(paths[1])], **OPTIONS),
    ):
        pass


def test_differing_settings_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vkbackend.models.hosts import joining

    words = iter(['{"fuse": true}', '{"fuse": false}'])
    monkeypatch.setattr(joining, "settings", lambda: next(words))
    path = write_tiny(tmp_path / "model.gguf", Tiny("llama", n_layer=1))
    with pytest.raises(PlanError, match=r"differs in its settings.*fuse"), twin_runner(path, TWO, **OPTIONS):
        pass


def test_a_host_without_the_model_file_is_named(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model.gguf", Tiny("llama", n_layer=1))
    with (
        pytest.raises(DeviceLost, match=r"GGUFError.*nowhere\.gguf"),
        twin_runner(path, TWO, models=[None, str(tmp_path / "nowhere.gguf")], **OPTIONS),
    ):
        pass


@pytest.mark.parametrize("word", ["numpy", "2/numpy", "/0", "0/", "-1/0", "x/0", "٣/0"])
def test_invalid_places(word: str) -> None:
    with pytest.raises(InvalidArgument, match="NODE/DEVICE"):
        place_of(word, 2)


def test_host_memory_is_counted_per_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "least_host_limit", lambda: HostLimit("available", 1000))
    card = Card("numpy", Limits(), True, False, None, None)
    there = [Elsewhere(n, f"node {n}", card) for n in (1, 2)]
    there[0].host_free = 500
    budgets = fit.host_budgets([NumpyDevice("numpy"), *there, NumpyDevice("numpy.1")])
    assert [(b.name, b.nbytes, b.members) for b in budgets] == [
        ("host memory (available)", 980, (0, 3)),
        ("memory of node 1", 490, (1,)),  # node 2 reports no memory
    ]
