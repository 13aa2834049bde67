"""What a step gives: logits, or the best tokens of each output row, which the devices choose among their
shares of the vocabulary, and what they may choose from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vkbackend.buffer import View
from vkbackend.limits import Limits
from vkbackend.meta.split import Ranges
from vkbackend.meta.tensor import Inputs
from vkbackend.ops import top_k_chunks
from vkbackend.runtime import Device


class TopK(NamedTuple):
    """ids int64 and float32 logits, both [n_outputs, k], best first, the lower id first on ties, NaN before
    all. A row with fewer candidates ends in logits of -inf, whose ids mean nothing. `log_sums`: float64
    [n_outputs], log(sum(exp(logits))) of all tokens of a row, where it was asked for.
    """

    ids: np.ndarray
    logits: np.ndarray
    log_sums: np.ndarray | None = None


def places(region: View, n_outputs: int, k: int, n_chunks: int) -> tuple[View, View, View]:
    """Where the host finds the places u32 and the values f32 [n_outputs, 1, k] of a device's best logits, and
    of a step that is `summed` f32 [n_outputs, n_chunks, 2], as `log_sum_exp` leaves them."""
    ids = View(region.buffer, region.offset, (n_outputs, 1, k), "u32")
    values = View(region.buffer, ids.end, (n_outputs, 1, k))
    return ids, values, View(region.buffer, values.end, (n_outputs, n_chunks, 2))


def found_in(region: View, n_outputs: int, k: int, limits: Limits, n_vocab: int) -> tuple[View, View, View]:
    """The same of a device's whole region, which chooses among `n_vocab` logits."""
    return places(region, n_outputs, k, top_k_chunks(limits, n_vocab, k)[1])


def write_masks(
    devices: Sequence[Device], inputs_of: Sequence[Inputs], vocab: Ranges, masks: np.ndarray
) -> None:
    """Hand every device its part of uint32 [n, ceil(n_vocab / 32)]."""
    bits = None
    for device, inputs, (begin, end) in zip(devices, inputs_of, vocab, strict=True):
        if inputs.mask is None or device.host:
            continue
        n_words = inputs.mask.shape[1]
        if begin % 32 == 0:
            part = masks[:, begin // 32 : begin // 32 + n_words]
        else:
            bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little") if bits is None else bits
            own = np.zeros((len(masks), 32 * n_words), np.uint8)
            own[:, : end - begin] = bits[:, begin:end]
            part = np.packbits(own, axis=1, bitorder="little").view(np.uint32)
        host = inputs.mask.buffer.host  # type: ignore[union-attr]
        target = host[inputs.mask.offset : inputs.mask.end].view(np.uint32).reshape(inputs.mask.shape)
        target[: len(masks)] = part
        device.flush(inputs.mask.buffer)  # type: ignore[arg-type]


def outputs(
    devices: Sequence[Device],
    inputs_of: Sequence[Inputs],
    vocab: Ranges,
    n_outputs: int,
    k: int,
    summed: bool,
) -> list[View | None]:
    """The words of each device's region that a step of `n_outputs` rows leaves: logits, or k candidates."""
    views: list[View | None] = []
    for device, inputs, (begin, end) in zip(devices, inputs_of, vocab, strict=True):
        if (region := inputs.logits) is None:
            views.append(None)
            continue
        if not device.host:
            device.invalidate(region.buffer)  # type: ignore[arg-type]
        last = region.rows(0, n_outputs)
        if k:
            last = found_in(region, n_outputs, k, device.limits, end - begin)[2 if summed else 1]
        views.append(View(region.buffer, region.offset, ((last.end - region.offset) // 4,), "u32"))
    return views


def read_logits(
    devices: Sequence[Device], inputs_of: Sequence[Inputs], vocab: Ranges, out: np.ndarray, n_outputs: int
) -> None:
    """Put the logits of the devices' shares together in `out`, float32 [>= n_outputs, n_vocab]."""
    for device, inputs, (begin, end) in zip(devices, inputs_of, vocab, strict=True):
        if inputs.logits is not None:
            view = inputs.logits
            device.invalidate(view.buffer)  # type: ignore[arg-type]
            host = view.buffer.host[: view.nbytes].view(np.float32)  # type: ignore[union-attr]
            out[:n_outputs, begin:end] = host.reshape(view.shape)[:n_outputs]


def read_top_k(
    devices: Sequence[Device],
    inputs_of: Sequence[Inputs],
    vocab: Ranges,
    n_outputs: int,
    k: int,
    summed: bool,
) -> TopK:
    """What the devices chose of their shares, merged."""
    ids, logits, sums = [], [], []
    for device, inputs, (begin, end) in zip(devices, inputs_of, vocab, strict=True):
        if inputs.logits is not None:
            device.invalidate(inputs.logits.buffer)  # type: ignore[arg-type]
            views = found_in(inputs.logits, n_outputs, k, device.limits, end - begin)
            host = views[0].buffer.host  # type: ignore[union-attr]
            found = host[views[0].offset : views[0].end].view(np.uint32).reshape(n_outputs, k)
            ids.append(found.astype(np.int64) + begin)
            logits.append(host[views[1].offset : views[1].end].view(np.float32).reshape(n_outputs, k))
            if summed:
                read = host[views[2].offset : views[2].end].view(np.float32)
                sums.append(read.reshape(views[2].shape))
    every, value = np.concatenate(ids, axis=1), np.concatenate(logits, axis=1)
    order = np.argsort(np.where(np.isnan(value), -np.inf, -value), axis=1, kind="stable")[:, :k]
    log_sums = log_of_sums(np.concatenate(sums, axis=1)) if summed else None
    return TopK(np.take_along_axis(every, order, 1), np.take_along_axis(value, order, 1), log_sums)


def log_of_sums(sums: np.ndarray) -> np.ndarray:
    """log(sum(exp(x))) of rows, float64 [n], from the largest element of each chunk of a row and its sum of
    exp(x - largest), [n, n_chunks, 2]."""
    peaks, sums = sums[..., 0].astype(np.float64), sums[..., 1].astype(np.float64)
    peak = peaks.max(axis=1)
    with np.errstate(all="ignore"):
        return peak + np.log((sums * np.exp(peaks - peak[:, None])).sum(axis=1))
