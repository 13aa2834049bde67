"""Read the result of a step: all logits, the best allowed tokens, or the hidden state of each output row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from vkbackend.buffer import Home, View
from vkbackend.limits import Limits
from vkbackend.meta.nodes import Nodes
from vkbackend.meta.split import Ranges
from vkbackend.meta.step_kind import Wanted, bucket
from vkbackend.meta.tensor import Inputs
from vkbackend.meta.transport import Transfers
from vkbackend.ops import top_k_chunks
from vkbackend.runtime import Device


class TopK(NamedTuple):
    """The best candidates of each row: int64 ids and float32 logits [n_outputs, k], best first. Equal logits
    are ordered by id. NaN precedes all numbers. If a row has fewer than k candidates, the other logits are
    -inf. If requested, `log_sums` is log(sum(exp(logits))) of each row, float64 [n_outputs]."""

    ids: np.ndarray
    logits: np.ndarray
    log_sums: np.ndarray | None = None


def places(region: View, n_outputs: int, k: int, n_chunks: int) -> tuple[View, View, View]:
    """Return three views of a device's region. The first has the best tokens, as indices of the device's
    vocabulary rows, u32 [n_outputs, 1, k]. The second has their logits, f32 of the same shape. The third is
    the output of `log_sum_exp`, f32 [n_outputs, n_chunks, 2]."""
    ids = View(region.buffer, region.offset, (n_outputs, 1, k), "u32")
    values = View(region.buffer, ids.end, (n_outputs, 1, k))
    return ids, values, View(region.buffer, values.end, (n_outputs, n_chunks, 2))


def found_in(region: View, n_outputs: int, k: int, limits: Limits, n_vocab: int) -> tuple[View, View, View]:
    """Return the views of a recorded step with `n_outputs` output rows."""
    return places(region, n_outputs, k, top_k_chunks(limits, n_vocab, k)[1])


class Outputs:
    """Memory for output rows, `nbytes[d]` bytes on device d. `vocabularies` holds the devices' rows of the
    model's vocabulary, then their rows of the vocabulary of drafts."""

    def __init__(
        self,
        devices: Sequence[Device] = (),
        inputs_of: Sequence[Inputs] = (),
        vocabularies: tuple[Ranges, Ranges] = ((), ()),
        nbytes: Sequence[int] = (),
        nodes: Nodes | None = None,
        n_places: int = 1,
    ) -> None:
        self._devices, self._nodes = devices, nodes
        self._vocab, self._draft_vocab = vocabularies
        self._masks = [inputs.mask for inputs in inputs_of]
        self._places = [[inputs.logits for inputs in inputs_of]]
        self._hidden = [[inputs.hidden for inputs in inputs_of]]
        for _ in range(1, n_places):
            regions, hidden = list(self._places[0]), list(self._hidden[0])
            for d, device in enumerate(devices):
                if device.node and nbytes[d]:
                    buffer = device.buffer(nbytes[d], Home.STAGING, "logits")
                    for views in (regions, hidden):
                        views[d] = (view := views[d]) and replace(view, buffer=buffer)
            self._places.append(regions)
            self._hidden.append(hidden)

    def write_masks(self, masks: np.ndarray) -> None:
        """Write the next step's masks, uint32 [n_outputs, ceil(n_vocab / 32)], lowest bit first."""
        bits = None
        for device, mask, (begin, end) in zip(self._devices, self._masks, self._vocab, strict=True):
            if mask is None or device.node:
                continue
            n_words = mask.shape[1]
            if begin % 32 == 0:
                part = masks[:, begin // 32 : begin // 32 + n_words]
            else:
                bits = (
                    np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little") if bits is None else bits
                )
                bits_here = np.zeros((len(masks), 32 * n_words), np.uint8)
                bits_here[:, : end - begin] = bits[:, begin:end]
                part = np.packbits(bits_here, axis=1, bitorder="little").view(np.uint32)
            host = mask.buffer.host  # type: ignore[union-attr]
            target = host[mask.offset : mask.end].view(np.uint32).reshape(mask.shape)
            target[: len(masks)] = part
            device.flush(mask.buffer)  # type: ignore[arg-type]

    # ---- between nodes ----

    def expect(self, n_outputs: int, wanted: Wanted, place: int = 0) -> None:
        """Begin to receive output rows on node 0 before the step, so that no sender waits."""
        if self._nodes and self._nodes.rank == 0:
            self._gather(n_outputs, wanted, place).start()

    def collect(self, n_outputs: int, wanted: Wanted, place: int = 0) -> None:
        """Transfer the step's output rows to node 0. All nodes must call this function after the step."""
        if self._nodes:
            gather = self._gather(n_outputs, wanted, place)
            if self._nodes.rank:
                gather.start()
            gather.finish()

    def _gather(self, n_outputs: int, wanted: Wanted, place: int) -> Transfers:
        assert self._nodes
        views: list[View | None] = []
        of_place = self._hidden[place] if wanted.hidden else self._places[place]
        for device, region, (begin, end) in zip(self._devices, of_place, self._rows(wanted), strict=True):
            if region is None or (begin == end and not wanted.hidden):
                views.append(None)
                continue
            if not device.node:
                device.invalidate(region.buffer)  # type: ignore[arg-type]
            last = region.rows(0, n_outputs)
            if not wanted.hidden:
                last = View(region.buffer, region.offset, (n_outputs, end - begin))
            if wanted.top_k:
                best = found_in(region, bucket(n_outputs), wanted.top_k, device.limits, end - begin)
                last = best[2 if wanted.summed else 1]
            views.append(View(region.buffer, region.offset, ((last.end - region.offset) // 4,), "u32"))
        return self._nodes.gather((n_outputs, wanted, place), views)

    # ---- on node 0 ----

    def _rows(self, wanted: Wanted) -> Ranges:
        return self._draft_vocab if wanted.ahead else self._vocab

    def read_logits(self, out: np.ndarray, n_outputs: int, wanted: Wanted, place: int = 0) -> np.ndarray:
        """Copy the logits to `out`, float32 [>= n_outputs, >= size of the vocabulary]. Return the part of
        `out` with the logits."""
        regions, vocab = self._places[place], self._rows(wanted)
        for device, region, (begin, end) in zip(self._devices, regions, vocab, strict=True):
            if region is not None and begin < end:
                device.invalidate(region.buffer)  # type: ignore[arg-type]
                nbytes = 4 * n_outputs * (end - begin)
                host = region.buffer.host[:nbytes].view(np.float32)  # type: ignore[union-attr]
                out[:n_outputs, begin:end] = host.reshape(n_outputs, end - begin)
        return out[:n_outputs, : max(end for _, end in vocab)]

    def read_hidden(self, n_outputs: int, place: int = 0) -> np.ndarray:
        """Return a copy of the hidden states, float32 [n_outputs, n_embd]."""
        views = zip(self._devices, self._hidden[place], strict=True)
        device, region = next((device, view) for device, view in views if view is not None)
        device.invalidate(region.buffer)  # type: ignore[arg-type]
        host = region.buffer.host[: region.nbytes].view(np.float32)  # type: ignore[union-attr]
        rows: np.ndarray = host.reshape(region.shape)[:n_outputs].copy()
        return rows

    def read_top_k(self, n_outputs: int, wanted: Wanted, n_recorded: int, place: int = 0) -> TopK:
        """`n_recorded` counts the output rows of the recorded step."""
        k, summed = wanted.top_k, wanted.summed
        ids, logits, sums = [], [], []
        regions = self._places[place]
        for device, region, (begin, end) in zip(self._devices, regions, self._rows(wanted), strict=True):
            if region is not None and begin < end:
                device.invalidate(region.buffer)  # type: ignore[arg-type]
                views = found_in(region, n_recorded, k, device.limits, end - begin)
                host = views[0].buffer.host  # type: ignore[union-attr]
                positions = host[views[0].offset : views[0].end].view(np.uint32).reshape(-1, k)
                ids.append(positions[:n_outputs].astype(np.int64) + begin)
                values = host[views[1].offset : views[1].end].view(np.float32).reshape(-1, k)
                logits.append(values[:n_outputs])
                if summed:
                    read = host[views[2].offset : views[2].end].view(np.float32)
                    sums.append(read.reshape(views[2].shape)[:n_outputs])
        every, value = np.concatenate(ids, axis=1), np.concatenate(logits, axis=1)
        order = np.argsort(np.where(np.isnan(value), -np.inf, -value), axis=1, kind="stable")[:, :k]
        log_sums = log_of_sums(np.concatenate(sums, axis=1)) if summed else None
        return TopK(np.take_along_axis(every, order, 1), np.take_along_axis(value, order, 1), log_sums)


def log_of_sums(sums: np.ndarray) -> np.ndarray:
    """Return log(sum(exp(x))) of each row, float64 [n]. `sums` [n, n_chunks, 2] holds each chunk's maximum
    and sum of exp(x - maximum)."""
    peaks, sums = sums[..., 0].astype(np.float64), sums[..., 1].astype(np.float64)
    peak = peaks.max(axis=1)
    with np.errstate(all="ignore"):
        return peak + np.log((sums * np.exp(peaks - peak[:, None])).sum(axis=1))
