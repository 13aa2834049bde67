"""Calls from node 0 and their replies, in msgpack. Every message has a type and a size limit, and no message
is unpickled.

Bytes that do not fit a type raise DeviceLost. Devices, names and ranges are checked before a call is
executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from vkbackend.errors import DeviceLost
from vkbackend.meta.gather import PIECE_NBYTES
from vkbackend.meta.step_kind import MAX_ADAPTERS, StepKind, Wanted
from vkbackend.models.engine.runner.micro_batch import BatchImages, MicroBatch
from vkbackend.models.options import Options
from vkbackend.ops import MAX_SLOTS, MAX_TOP_K
from vkbackend.step import MAX_ROWS, MAX_RUNS, Mix

MAX_CALL_NBYTES = 2 * PIECE_NBYTES + (1 << 16)  # Room for the masks of all rows, or for one piece of a state.
MAX_REPLY_NBYTES = PIECE_NBYTES + (1 << 16)
MAX_OPTIONS_NBYTES = 1 << 20
MAX_COPIES = 1 << 16

U32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
U63 = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Device = Annotated[int, Meta(ge=0, lt=MAX_SLOTS)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
Piece = Annotated[bytes, Meta(max_length=PIECE_NBYTES + 4096)]
Rate = Annotated[float, Meta(gt=0)]
Floats = Annotated[bytes, Meta(max_length=1 << 22)]


class _Call(Struct, forbid_unknown_fields=True, tag=True):
    pass


class Open(_Call):
    """`options` holds the fields of `Options` as JSON."""

    options: Annotated[bytes, Meta(max_length=MAX_OPTIONS_NBYTES)]
    interleave: bool | None


class Measure(_Call):
    """Measure devices and network before Open is sent. A node replies with its cards and speeds, then sends
    Place, and then exchanges messages of `sizes` bytes."""

    devices: Annotated[list[Name], Meta(max_length=MAX_SLOTS)]
    sizes: Annotated[list[Annotated[int, Meta(ge=4, le=PIECE_NBYTES)]], Meta(max_length=16)]


class Reduces(_Call):
    """Time all-reduces before Open. The reply is True if the sums were exact."""

    devices: Annotated[list[Name], Meta(max_length=MAX_SLOTS)]
    nbytes: Annotated[int, Meta(ge=4, le=1 << 28)]
    repeats: Annotated[int, Meta(ge=1, le=1000)]
    reduce_type: Name
    reduce_provider: Name
    submit_ahead: U32 | None
    reduce_signal: Name


class Fitted(Struct, forbid_unknown_fields=True):
    """The options that `fit` chooses, besides shares and layers."""

    n_ctx: Annotated[int, Meta(ge=1, le=(1 << 32) - 1)]
    n_slots: Annotated[int, Meta(ge=1, le=MAX_RUNS)]
    kv_cells: U32 | None
    type_k: Name
    type_v: Name
    override_tensor: Annotated[list[tuple[Text, Name]], Meta(max_length=256)]
    moe_cache_mib: Annotated[float, Meta(ge=0)]
    n_ubatch: Annotated[int, Meta(ge=0, le=MAX_ROWS)]

    @classmethod
    def of(cls, options: Options) -> Fitted:
        return msgspec.convert({f.name: getattr(options, f.name) for f in msgspec.structs.fields(cls)}, cls)


class Settle(_Call):
    """The shares, the layers and the fitted options that node 0 decided."""

    tensor_split: Annotated[list[Annotated[float, Meta(ge=0)]], Meta(max_length=MAX_SLOTS)] | None
    n_gpu_layers: U32 | None
    fitted: Fitted | None = None


class Record(_Call):
    n_rows: Annotated[int, Meta(ge=1, le=MAX_ROWS)]
    n_outputs: Annotated[int, Meta(ge=0, le=MAX_ROWS)]
    mix: Annotated[int, Meta(ge=1, le=4)]
    top_k: Annotated[int, Meta(ge=0, le=MAX_TOP_K)]
    summed: bool
    masked: bool
    halves: bool
    ahead: bool = False
    adapters: Literal[0, 1, 2, 4] = 0
    hidden: bool = False
    images: bool = False
    sees_end: bool = False

    @classmethod
    def of(cls, kind: StepKind) -> Record:
        top_k, summed, ahead, hidden = kind.wanted
        counts = kind.n_rows, kind.n_outputs, int(kind.mix), top_k
        rest = kind.masked, kind.halves, ahead, kind.adapters, hidden, kind.images, kind.sees_end
        return cls(*counts, summed, *rest)  # type: ignore[arg-type]

    def kind(self) -> StepKind:
        wanted = Wanted(self.top_k, self.summed, self.ahead, self.hidden)
        rest = self.masked, self.halves, self.adapters
        kind = StepKind(self.n_rows, self.n_outputs, Mix(self.mix), wanted, *rest)
        return kind._replace(images=self.images, sees_end=self.sees_end)


class RunData(Struct, array_like=True, forbid_unknown_fields=True):
    slot: Annotated[int, Meta(ge=0, lt=MAX_RUNS)]
    first_row: Annotated[int, Meta(ge=0, lt=MAX_ROWS)]
    n_rows: Annotated[int, Meta(ge=1, le=MAX_ROWS)]
    first_pos: U32
    # Cells of recurrent states; -1 means the slot's own cell.
    read: Annotated[int, Meta(ge=-1, lt=1 << 16)] = -1
    written: Annotated[int, Meta(ge=-1, lt=1 << 16)] = -1
    adapters: Annotated[list[tuple[U32, float]], Meta(max_length=MAX_ADAPTERS)] = []
    second: Annotated[int, Meta(ge=0, lt=MAX_ROWS)] = 0
    end: U32 = 0


class Images(_Call):
    """Rows of an image in the next Step, float32 [n_rows, values of a row]. Several calls add their rows."""

    first_row: Annotated[int, Meta(ge=0, lt=MAX_ROWS)]
    n_rows: Annotated[int, Meta(ge=1, le=MAX_ROWS)]
    values: Piece


class Step(_Call):
    tokens: Annotated[list[U32], Meta(min_length=1, max_length=MAX_ROWS)]
    runs: Annotated[list[RunData], Meta(min_length=1, max_length=MAX_RUNS)]
    outputs: Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_ROWS)]], Meta(max_length=MAX_ROWS)]
    top_k: Annotated[int, Meta(ge=0, le=MAX_TOP_K)] = 0
    masks: Annotated[bytes, Meta(max_length=2 * PIECE_NBYTES)] | None = None
    summed: bool = False
    rope: Annotated[dict[Name, Floats], Meta(max_length=16)] | None = None
    ahead: bool = False
    hidden: bool = False
    images: bool = False
    sees_end: bool = False

    @classmethod
    def of(cls, batch: MicroBatch, wanted: Wanted, tables: Mapping[str, np.ndarray] | None) -> Step:
        runs = [
            RunData(
                r.slot,
                r.first_row,
                r.n_rows,
                r.first_pos,
                *((r.states[0], r.states[-1]) if r.states else (-1, -1)),
                list(r.adapters),
                r.second,
                r.end,
            )
            for r in batch.runs  # with several nodes, rows of drafts have no state cells
        ]
        masks = None if batch.masks is None else np.ascontiguousarray(batch.masks).tobytes()
        rope = {name: rows.tobytes() for name, rows in tables.items()} if tables else None
        tokens, outputs = list(batch.tokens), list(batch.outputs)
        k, summed, ahead, hidden = wanted
        images = batch.images or BatchImages(())
        flags = bool(images.rows), images.sees_end
        return cls(tokens, runs, outputs, k, masks, summed, rope, ahead, hidden, *flags)


class Shift(_Call):
    """Move positions `first` to `end` - 1 of a slot down by `distance`. `rope` maps the name of each RoPE
    table to cos and sin of the rotation."""

    slot: Annotated[int, Meta(ge=0, lt=MAX_RUNS)]
    first: U32
    end: U32
    distance: Annotated[int, Meta(ge=1, le=(1 << 32) - 1)]
    rope: Annotated[dict[Name, Floats], Meta(max_length=16)]


class Write(_Call):
    device: Device
    name: Name
    offset: U63
    data: Piece


class Read(_Call):
    """Read bytes from a device's memory `name`."""

    device: Device
    name: Name
    offset: U63
    nbytes: Annotated[int, Meta(ge=1, le=PIECE_NBYTES)]


class Range(Struct, array_like=True, forbid_unknown_fields=True):
    name: Name
    offset: U63
    nbytes: Annotated[int, Meta(ge=1, le=PIECE_NBYTES)]


class ReadMany(_Call):
    """Read ranges of at most PIECE_NBYTES in total. The reply is their bytes, one after another."""

    device: Device
    ranges: Annotated[list[Range], Meta(min_length=1, max_length=MAX_COPIES)]


class CopyData(Struct, array_like=True, forbid_unknown_fields=True):
    name: Name
    source: U63
    target: U63
    nbytes: U63


class CopyRanges(_Call):
    device: Device
    copies: Annotated[list[CopyData], Meta(min_length=1, max_length=MAX_COPIES)]


class AskMemory(_Call):
    """The reply is a MemoryReport."""


class End(_Call):
    """Release everything and end."""


Call = (
    Open
    | Measure
    | Reduces
    | Settle
    | Record
    | Images
    | Step
    | Shift
    | Write
    | Read
    | ReadMany
    | CopyRanges
    | AskMemory
    | End
)


class LimitsData(Struct, forbid_unknown_fields=True):
    max_invocations: U32
    max_shared_nbytes: U32
    max_groups: tuple[U32, U32, U32]
    storage_align: U32
    uniform_align: U32
    max_storage_range: U63
    max_allocation_nbytes: U63
    host_import_align: U32
    subgroup_size: U32
    is_cpu: bool
    batch_invariant: bool
    choices: Annotated[list[tuple[Name, Annotated[list[Name], Meta(max_length=64)]]], Meta(max_length=256)]
    matrix_units: tuple[Name, U32, U32, U32, U32, U32]
    features: Annotated[list[Name], Meta(max_length=256)]


class HeapData(Struct, array_like=True, forbid_unknown_fields=True):
    nbytes: U63
    device_local: bool
    budget: U63


class PhysicalData(Struct, forbid_unknown_fields=True):
    name: Name
    uuid: Name
    vendor: Name
    driver: Name
    driver_version: Name
    is_cpu: bool
    heaps: Annotated[list[HeapData], Meta(min_length=1, max_length=16)]


class CardData(Struct, forbid_unknown_fields=True):
    name: Name
    limits: LimitsData
    imports_pages: bool
    has_codebooks: bool
    free: U63 | None
    physical: PhysicalData | None
    speed: tuple[Rate, Rate] | None


class Cards(Struct, forbid_unknown_fields=True):
    """`devices` maps a device's number in the group to its card. `host_free` is in bytes."""

    devices: Annotated[dict[Device, CardData], Meta(max_length=MAX_SLOTS)]
    host_free: U63 | None = None


class Place(Struct, forbid_unknown_fields=True):
    where: Text


class Likeness(Struct, forbid_unknown_fields=True):
    """All values except `tables` must be equal on all nodes."""

    version: Name
    settings: Text
    model: Name
    options: Text
    plan: Name
    limits: Name
    sizes: Name
    tables: Name  # hash of cos and sin


MemoryRow = Annotated[dict[Name, U63 | Name | None], Meta(max_length=32)]


class MemoryReport(Struct, forbid_unknown_fields=True):
    """Rows of `Runner.memory` by device."""

    devices: Annotated[dict[Device, MemoryRow], Meta(max_length=MAX_SLOTS)]


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, Any] = {}


def encode(message: object) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes, type_: Any, sender: str) -> Any:
    """Raises DeviceLost if the bytes are not a message of `type_`."""
    decoder = _decoders.get(type_)
    if decoder is None:
        decoder = _decoders[type_] = msgspec.msgpack.Decoder(type_)
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DeviceLost(
            f"{sender} sent bytes that are not a message of this version ({error}); use the same version of "
            "vkbackend on all nodes"
        ) from None
