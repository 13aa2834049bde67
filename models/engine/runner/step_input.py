"""Writes the input of a step: tokens, positions, rows of cos and sin, rows of images, adapters and masks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vkbackend.meta.mesh import Mesh
from vkbackend.meta.sizing import StepShape
from vkbackend.meta.step_kind import StepKind
from vkbackend.models.engine.runner.adapter_rows import AdapterRows
from vkbackend.models.engine.runner.image_rows import write_images
from vkbackend.models.engine.runner.micro_batch import MicroBatch
from vkbackend.models.engine.runner.rope_rows import RopeRows
from vkbackend.step import StepParams, cut_runs

Tables = Mapping[str, np.ndarray]


class StepInput:
    """The memory is allocated once. Each step overwrites it."""

    def __init__(
        self, mesh: Mesh, shape: StepShape, ropes: RopeRows, *, has_adapters: bool, encodes: bool
    ) -> None:
        self._mesh, self._ropes, self._encodes = mesh, ropes, encodes
        self._params, self._second = StepParams(), StepParams()
        self._adapters = AdapterRows(shape) if has_adapters else None

    def write(self, batch: MicroBatch, kind: StepKind, tables: Tables | None = None) -> None:
        """Write the input of this node's devices. `tables` contains rows of cos and sin that replace this
        node's rows."""
        tokens, runs, outputs, masks, stage, images = batch
        if stage > 0:  # the rows read the residuals of their positions
            tokens = [p for r in runs for p in range(r.first_pos, r.first_pos + r.n_rows)]
        n_rows, params = len(tokens), self._params
        half = kind.n_rows // 2 if kind.halves else 0
        second = self._second if half else None
        if masks is not None:
            self._mesh.outputs.write_masks(masks)
        parts = [(runs, outputs)]
        if second:
            front, back = cut_runs(runs, half)
            parts = [(front, []), (back, [i - half for i in outputs])]
            params.fill(tokens[:half], *parts[0], kind.mix)
            second.fill(tokens[half:], *parts[1], kind.mix)
        elif images:
            params.fill(tokens, runs, outputs, kind.mix, ends=kind.sees_end)
        else:
            params.fill(tokens, runs, outputs, kind.mix, typed=self._encodes)
        positions = params.rows[: half or n_rows, 0]
        if second:
            positions = np.concatenate([positions, second.rows[: n_rows - half, 0]])
        if images:
            write_images(self._mesh, images.rows, params, second, n_rows)
            tables = tables or self._ropes.of_images(images)
        adapters = self._adapters.at(kind, parts) if kind.adapters and self._adapters else None
        self._mesh.write_step(params, tables or self._ropes.at(positions), second, adapters)

    def tables_for_nodes(self, batch: MicroBatch, sends_tables: bool) -> Tables | None:
        """Return the rows of cos and sin that other nodes get, or None if they compute them."""
        tables = self._ropes.of_images(batch.images)
        if tables is None and sends_tables:
            positions = [np.arange(r.first_pos, r.first_pos + r.n_rows) for r in batch.runs]
            tables = self._ropes.at(np.concatenate(positions))
        return tables
