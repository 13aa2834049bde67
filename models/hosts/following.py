"""A follower loads the model that node 0 names and executes node 0's calls.

A call is first checked against the loaded model. A node that cannot continue sends the reason, and the group
ends.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vkbackend.buffer import View
from vkbackend.errors import DeviceLost
from vkbackend.meta.gather import PIECE_NBYTES
from vkbackend.meta.step_kind import Wanted, bucket
from vkbackend.models.engine.runner.micro_batch import BatchImages, MicroBatch
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.hosts.calls import JOIN_S
from vkbackend.models.hosts.group import Group
from vkbackend.models.hosts.node_messages import (
    AskMemory,
    CopyRanges,
    End,
    Images,
    Measure,
    MemoryReport,
    Open,
    Read,
    ReadMany,
    Record,
    Reduces,
    Shift,
    Step,
    Write,
    encode,
)
from vkbackend.models.hosts.survey import answer_reduces, answer_survey
from vkbackend.models.options import Options
from vkbackend.recording import Recording
from vkbackend.step import Run

IDLE_S = 1e9  # no limit, because heartbeats show that node 0 is alive


def follow(group: Group, model: str | None = None) -> None:
    """Execute node 0's calls until End. `model` is this node's path of the model if it differs from node 0's.
    Raises the error that ended the group."""
    try:
        call = group.expect(Open | Measure | Reduces | End, JOIN_S)
        while isinstance(call, Measure | Reduces):
            if isinstance(call, Measure):
                answer_survey(group, call)
            else:
                answer_reduces(group, call)
            call = group.next_call(IDLE_S)
        if isinstance(call, End):
            return
        given = json.loads(call.options)
        if model is not None:
            folder = Path(model).parent
            vectors = [(str(folder / Path(path).name), scale) for path, scale in given["control_vectors"]]
            adapters = [(name, str(folder / Path(path).name), scale) for name, path, scale in given["lora"]]
            draft = given["draft"] and str(folder / Path(given["draft"]).name)
            given |= {"path": model, "draft": draft, "control_vectors": vectors, "lora": adapters}
        runner = Runner(Options(**given), group=group, interleave=call.interleave)
        try:
            while not isinstance(call := group.next_call(IDLE_S), End):
                obey(group, runner, call)
        finally:
            runner.close()
    except Exception as error:
        if not group.lost:
            group.fail(f"{type(error).__name__}: {error}")
        raise


def obey(group: Group, runner: Runner, call: Any) -> None:
    """Execute a call. Raises DeviceLost for a call that does not fit the loaded model."""
    mesh = runner.mesh
    match call:
        case Images():
            width = runner.image_width
            n_known = sum(len(values) for _, values in group.images)
            _require(0 < width and len(call.values) == 4 * call.n_rows * width, call)
            _require(n_known + call.n_rows <= runner.n_ubatch, call)
            values = np.frombuffer(call.values, np.float32).reshape(call.n_rows, width)
            group.images.append((call.first_row, values))
        case Step():
            images, group.images = group.images, []
            _step(runner, call, images)
        case Record():
            most = runner.max_hidden if call.hidden else runner.max_outputs
            _require(call.n_rows <= runner.n_ubatch and call.n_outputs <= most, call)
            _require(not (call.hidden and call.top_k), call)
            _require(call.adapters <= bucket(len(runner.adapters)), call)
            _require(call.top_k <= runner.max_top_k and (not call.masked or call.top_k > 0), call)
            _require(not call.ahead or runner.model.n_ahead > 0, call)
            _require(call.images >= call.sees_end and runner.image_width >= call.images, call)
            mesh.recorded_step(call.kind())
            group.recorded()
        case Shift():
            widths = runner.shift_widths
            _require(widths is not None, call)
            assert widths is not None
            _require(call.rope.keys() == widths.keys(), call)
            _require(all(len(rows) == 4 * widths[name] for name, rows in call.rope.items()), call)
            _require(call.slot < runner.n_slots and call.distance <= call.first <= call.end, call)
            _require(call.end <= runner.n_ctx, call)
            cos_sin = {
                name: np.frombuffer(rows, np.float32).reshape(-1, 2) for name, rows in call.rope.items()
            }
            runner.obey_shift(call.slot, call.first, call.end, call.distance, cos_sin)
        case Write():
            data = np.frombuffer(call.data, np.uint8)
            view = _range(group, runner, call.device, call.name, call.offset, len(data), call)
            mesh.devices[call.device].write(view, data)
        case Read():
            view = _range(group, runner, call.device, call.name, call.offset, call.nbytes, call)
            group.reply(mesh.devices[call.device].read(view).tobytes())
        case ReadMany():
            _require(sum(r.nbytes for r in call.ranges) <= PIECE_NBYTES, call)
            views = [
                _range(group, runner, call.device, r.name, r.offset, r.nbytes, call) for r in call.ranges
            ]
            group.reply(b"".join(array.data for array in mesh.devices[call.device].read_many(views)))
        case CopyRanges():
            recording = Recording("copies")
            for c in call.copies:
                source = _range(group, runner, call.device, c.name, c.source, c.nbytes, call)
                target = _range(group, runner, call.device, c.name, c.target, c.nbytes, call)
                recording.copy(source, target, c.name)
            mesh.devices[call.device].run(recording)
        case AskMemory():
            rows = {d: row for d, row in enumerate(runner.memory()) if group.nodes.is_here(d)}
            group.reply(encode(MemoryReport(rows)))
        case _:
            _require(False, call)


def _step(runner: Runner, call: Step, images: list[tuple[int, np.ndarray]]) -> None:
    n_rows = len(call.tokens)
    most = runner.max_hidden if call.hidden else runner.max_outputs
    _require(n_rows <= runner.n_ubatch and len(call.outputs) <= most, call)
    _require(not (call.hidden and call.top_k), call)
    _require(max(call.tokens) < runner.n_vocab and all(i < n_rows for i in call.outputs), call)
    _require(call.top_k in (0, 1, runner.max_top_k) and (not call.top_k or bool(call.outputs)), call)
    at = 0
    n_cells = runner.states.n_cells if runner.states else 0
    for run in call.runs:
        _require(run.slot < runner.n_slots and run.first_row == at, call)
        _require(run.first_pos + run.n_rows <= runner.n_ctx, call)
        _require(all(0 <= i < len(runner.adapters) for i, _ in run.adapters), call)
        _require(-1 <= run.read < n_cells and -1 <= run.written < n_cells, call)
        _require(run.end == 0 or (call.sees_end and run.end <= runner.n_ctx), call)
        at += run.n_rows
    _require(at == n_rows, call)
    _require(call.images == bool(images) and call.images >= call.sees_end, call)
    _require(all(first + len(values) <= n_rows for first, values in images), call)
    masks = None
    if call.masks is not None:
        words = -(-runner.n_vocab // 32)
        _require(call.top_k > 0 and len(call.masks) == 4 * words * len(call.outputs), call)
        masks = np.frombuffer(call.masks, np.uint32).reshape(-1, words)
    tables = None
    if call.rope is not None:
        widths = {name: table.n_rot for name, table in runner.model.ropes(runner.n_ctx).items()}
        _require(call.rope.keys() == widths.keys(), call)
        _require(all(len(rows) == 4 * n_rows * widths[name] for name, rows in call.rope.items()), call)
        tables = {name: np.frombuffer(rows, np.float32) for name, rows in call.rope.items()}
    _require(not call.ahead or (runner.model.n_ahead > 0 and len(call.runs) == n_rows), call)
    runs = [
        Run(
            r.slot,
            r.first_row,
            r.n_rows,
            r.first_pos,
            (r.read, r.written) if r.written >= 0 else None,
            adapters=tuple(r.adapters),
            second=r.second,
            end=r.end,
        )
        for r in call.runs
    ]
    wanted = Wanted(call.top_k, call.summed, call.ahead, call.hidden)
    of_images = BatchImages(images, None, call.sees_end) if images else None
    batch = MicroBatch(call.tokens, runs, call.outputs, masks, images=of_images)
    runner.compute(batch, runner.recorded_step(batch, wanted), tables)
    if call.outputs:
        runner.mesh.outputs.collect(len(call.outputs), wanted)


def _range(group: Group, runner: Runner, device: int, name: str, offset: int, nbytes: int, call: Any) -> View:
    store = runner.mesh.stores.changing.get(name)
    _require(store is not None and device < len(group.nodes.of) and group.nodes.is_here(device), call)
    assert store is not None
    pieces = store.pieces[device]
    _require(bool(pieces) and offset % 4 == 0 and 0 < nbytes and nbytes % 4 == 0, call)
    whole = pieces[0][1]
    _require(offset >= whole.offset and offset + nbytes <= whole.end, call)
    return replace(whole, offset=offset, shape=(nbytes // 4,), dtype="u32")


def _require(fits: bool, call: Any) -> None:
    if not fits:
        raise DeviceLost(f"node 0 asked for a {type(call).__name__.lower()} that does not fit what is loaded")
