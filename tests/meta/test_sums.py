"""Partial sums of numpy devices are exchanged only when an op needs the complete sum."""

from __future__ import annotations

import numpy as np
import pytest

from vkbackend.buffer import Buffer, Home, View
from vkbackend.errors import PlanError
from vkbackend.memory import plan_scratch
from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.imported_pages import ImportedPages
from vkbackend.meta.reduce import Provider, Reduce
from vkbackend.meta.split import MIRRORED, Kind, State, partial, split
from vkbackend.meta.step_kind import StepKind
from vkbackend.meta.tensor import Inputs, Tensor, Weight
from vkbackend.meta.ways import make_provider
from vkbackend.recording import Dispatch, Exchange
from vkbackend.step import step_words
from vkbackend.twins.device import NumpyDevice

pytestmark = pytest.mark.no_vulkan


def graph_of(n: int, width: int = 8) -> tuple[Graph, list[NumpyDevice], Provider | None]:
    devices = [NumpyDevice(f"numpy.{d}") for d in range(n)]
    inputs = []
    for device in devices:
        local, host = (
            device.buffer(4 * step_words(1), Home.SCRATCH, "step"),
            device.buffer(4 * step_words(1), Home.STAGING, "h"),
        )
        words = View(local, 0, (step_words(1),))
        inputs.append(Inputs(View(local, 0, words.shape, "u32"), {}, View(host, 0, words.shape), words, None))
    provider = make_provider(devices, 4 * width) if n > 1 else None
    return Graph(devices, inputs, provider, StepKind.of_run(1, 1)), devices, provider


def leaf(graph: Graph, values: list[list[float] | None], state: State) -> Tensor:
    views: list[View | None] = []
    for device, row in zip(graph.devices, values, strict=True):
        if row is None:
            views.append(None)
            continue
        view = View(device.buffer(4 * len(row), Home.WEIGHTS, "leaf"), 0, (1, len(row)))
        device.write(view, np.array([row], np.float32))
        views.append(view)
    return Tensor(graph, 1, 4, state, views)


def replay(
    graph: Graph, devices: list[NumpyDevice], provider: Provider | None, y: Tensor
) -> list[list[float]]:
    arenas, executables = [], []
    for device, recording in zip(devices, graph.recordings, strict=True):
        offsets, total = plan_scratch(recording)
        arena = device.buffer(max(total, 4), Home.SCRATCH, "arena")
        places = {value: View(arena, at, (value.nbytes // 4,)) for value, at in offsets.items()}
        arenas.append((arena, offsets))
        executables.append(device.build(recording.place(places)))
    for s in range(executables[0].n_segments):
        for device, executable in zip(devices, executables, strict=True):
            device.queue.allow(s + 1)
            device.queue.submit(executable, s, 1)
        if s < len(graph.reduces):
            assert provider is not None
            provider.exchange(graph.reduces[s])
    rows = []
    for device, view, (arena, offsets) in zip(devices, y.views, arenas, strict=True):
        assert view is not None
        at = (
            view
            if isinstance(view.buffer, Buffer)
            else View(arena, offsets[view.buffer] + view.offset, view.shape)
        )
        rows.append(device.read(at).view(np.float32).tolist())
    return rows


A, B, BASE = [1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0], [0.5, 0.5, 0.5, 0.5]


def test_a_sum_of_partials_is_reduced_once() -> None:
    graph, devices, provider = graph_of(2)
    a, b = leaf(graph, [A, B], partial((0, 1))), leaf(graph, [B, None], partial((0,)))
    total = a + b
    assert total.state.kind is Kind.PARTIAL and total.state.writers == (0, 1) and not graph.reduces
    whole = ops.whole(total)
    assert ops.whole(total) is whole and whole.state == MIRRORED and len(graph.reduces) == 1
    want = (2 * np.array(B) + A).tolist()
    assert replay(graph, devices, provider, whole) == [want, want]


def test_the_mirrored_addend_is_added_once() -> None:
    graph, devices, provider = graph_of(3)
    a, base = leaf(graph, [A, None, B], partial((0, 2))), leaf(graph, [BASE] * 3, MIRRORED)
    lazy = base + (a + base)
    assert lazy.state.kind is Kind.PARTIAL and not graph.reduces
    whole = ops.whole(lazy)
    assert [r.writers for r in graph.reduces] == [(0, 2)]
    assert replay(graph, devices, provider, whole) == [(np.array(A) + B + 1.0).tolist()] * 3


def test_two_branches_on_a_base_share_one_reduce() -> None:
    """The graph computes h + attention(h) + ffn(h), as models with parallel attention and FFN do."""
    graph, devices, provider = graph_of(2)
    h = leaf(graph, [BASE] * 2, MIRRORED)
    y = h + leaf(graph, [A, B], partial((0, 1))) + leaf(graph, [B, A], partial((0, 1)))
    whole = ops.whole(y)
    assert len(graph.reduces) == 1
    assert replay(graph, devices, provider, whole) == [(2 * np.array(A) + 2 * np.array(B) + 0.5).tolist()] * 2


def test_a_scaled_sum_stays_lazy_and_a_capped_one_does_not() -> None:
    graph, devices, provider = graph_of(2)
    h = leaf(graph, [BASE] * 2, MIRRORED)
    y = ops.scale(h + leaf(graph, [A, B], partial((0, 1))), 3.0) + leaf(graph, [B, A], partial((0, 1)))
    assert y.state.kind is Kind.PARTIAL and not graph.reduces
    capped = ops.softcap(y, 100.0)
    assert capped.state == MIRRORED and len(graph.reduces) == 1
    want = 100 * np.tanh((4 * np.array(A) + 4 * np.array(B) + 1.5) / 100)
    for row in replay(graph, devices, provider, capped):
        np.testing.assert_allclose(row, want, rtol=1e-6)


def test_gates_are_multiplied_on_the_device_of_their_columns() -> None:
    graph, devices, provider = graph_of(2)
    state = split(1, ((0, 1), (1, 4)))
    a, b = leaf(graph, [A[:1], A[1:]], state), leaf(graph, [B[:1], B[1:]], state)
    y = ops.mul(ops.sigmoid_mul(a, b), b)
    assert y.state == state and not graph.reduces
    got = np.concatenate(replay(graph, devices, provider, y))
    np.testing.assert_allclose(got, np.array(B) ** 2 / (1 + np.exp(-np.array(A))), rtol=1e-6)
    with pytest.raises(PlanError, match="gelu_mul"):
        ops.gelu_mul(a, leaf(graph, [B] * 2, MIRRORED))


def test_the_bias_of_a_sum_is_added_by_one_writer() -> None:
    graph, devices, provider = graph_of(3)
    x = leaf(graph, [None, [1.0, 2.0], [3.0, 4.0]], split(1, ((0, 0), (0, 2), (2, 4))))

    def weight(name: str, state: State, values: list[np.ndarray | None]) -> Weight:
        pieces: list[list[tuple[int, View]]] = []
        for device, values_here in zip(devices, values, strict=True):
            pieces.append([])
            if values_here is not None:
                view = View(device.buffer(values_here.nbytes, Home.WEIGHTS, name), 0, values_here.shape)
                device.write(view, values_here)
                pieces[-1].append((0, view))
        return Weight(name, (4, 4) if "weight" in name else (4,), "f32", state, pieces)

    identity = np.eye(4, dtype=np.float32)
    cut = [None, np.ascontiguousarray(identity[:, :2]), np.ascontiguousarray(identity[:, 2:])]
    w = weight("o.weight", split(1, x.state.ranges), cut)
    y = ops.linear(x, w, weight("o.bias", MIRRORED, [np.array(B, np.float32)] * 3))
    assert y.state == partial((1, 2))
    products = [
        [dict(c.push)["has_bias"] for c in r.accesses() if isinstance(c, Dispatch)] for r in graph.recordings
    ]
    assert products == [[], [1], [0]]
    assert replay(graph, devices, provider, ops.whole(y)) == [(np.array(A) + B).tolist()] * 3


def test_on_one_device_nothing_is_exchanged() -> None:
    graph, devices, provider = graph_of(1)
    whole = ops.whole(leaf(graph, [A], partial((0,))) + leaf(graph, [BASE], MIRRORED))
    assert not graph.reduces and not any(isinstance(c, Exchange) for c in graph.recordings[0].commands)
    assert replay(graph, devices, provider, whole) == [(np.array(A) + 0.5).tolist()]


def test_reducing_a_complete_value_is_refused() -> None:
    graph, _, _ = graph_of(2)
    with pytest.raises(PlanError, match="all_reduce of a tensor that is MIRRORED"):
        graph.all_reduce(leaf(graph, [A, A], MIRRORED))


def test_slots_do_not_overlap_and_are_256_bytes_apart() -> None:
    devices = [NumpyDevice(str(d)) for d in range(3)]
    provider = ImportedPages(devices, 100)
    reduces = [Reduce(parity, 1, (), lane=lane) for parity in (0, 1) for lane in (0, 1)]
    places = sorted(provider.slot(d, reduce).offset for d in range(3) for reduce in reduces)
    assert places == [256 * i for i in range(12)]
    provider.close()
    assert not any(device.counts["buffer"] for device in devices)
