"""Computes a projector's exact bytes from its file, before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from vkbackend.buffer import ALIGN
from vkbackend.errors import InvalidArgument, OutOfDeviceMemory, UnsupportedModel
from vkbackend.meta.sizing import StepShape, StepSizes, measure
from vkbackend.meta.slices import Load
from vkbackend.meta.split import MIRRORED
from vkbackend.meta.step_kind import StepKind, Wanted, bucket
from vkbackend.meta.tensor import Weight
from vkbackend.models.architectures.base import Weights, all_weights
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.placement.fit import (
    NAMES,
    budgets_of,
    host_budgets,
    largest,
    mib,
    shortfall,
    without,
)
from vkbackend.models.placement.memory_report import Held, add_loads
from vkbackend.models.placement.resident import Resident
from vkbackend.models.placement.tensors import check_weights
from vkbackend.models.placement.traced_steps import traced_weights
from vkbackend.models.vision.config import TokenLimits, projector_type
from vkbackend.models.vision.encoder import CELLS, Encoder
from vkbackend.models.vision.registry import family
from vkbackend.ops import CELL_BLOCK
from vkbackend.runtime import Device
from vkbackend.step import Mix
from vkbackend.twins.device import NullDevice

ANOTHER_DEVICE = "another --mmproj-device (none: the processor)"
MAX_PATCHES = 1 << 15  # A dispatch has up to 65,535 rows.


@dataclass(frozen=True, slots=True)
class ProjectorPlan:
    """A projector on `device`. `shape` and `sizes` describe the largest picture's step. `held` are the
    bytes that loading allocates."""

    encoder: Encoder
    device: Device
    limits: TokenLimits
    loads: tuple[Load, ...]
    shape: StepShape
    sizes: StepSizes
    held: Held

    @property
    def resident(self) -> Resident:
        return Resident("projector", (self.device,), (self.held,))

    def check_fit(self, residents: Sequence[Resident] = ()) -> None:
        """Raise OutOfDeviceMemory if the projector does not fit its device or the host. `residents` may have
        memory on the device."""
        devices = [self.device]
        budgets = [*without(budgets_of(devices), devices, residents), *host_budgets(devices, residents)]
        full = shortfall([self.held], budgets)
        if full is None:
            return

        def fits(n_tokens: int) -> bool:
            limits = replace(self.limits, max_tokens=n_tokens)
            shape, sizes = _sized(self.encoder, self.device, self.loads, limits)
            return shortfall([_held(self.device, self.loads, shape, sizes)], budgets) is None

        least = self.limits.min_tokens or 1
        n_tokens = largest(1, self.encoder.config.most_tokens(self.limits), fits)
        ways = [f"--image-max-tokens {n_tokens}"] if n_tokens >= least else []
        names = NAMES | {"kv": "tables"}
        parts = ", ".join(f"{mib(n)} of {names[home]}" for home, n in full.held([self.held]).items() if n)
        raise OutOfDeviceMemory(
            f"{self.encoder.config.path}: {full.name} would hold {parts} of the projector, but has "
            f"{full.room}; use {', or '.join([*ways, ANOTHER_DEVICE])}",
            requested=sum(full.held([self.held]).values()),
            budget=full.nbytes,
        )


def plan_projector(
    gguf: GGUF, device: Device, *, text: GGUF | None = None, limits: TokenLimits | None = None
) -> ProjectorPlan:
    """Plan a projector file on a device, which may be a stand-in. `text` is the text model's file, which must
    match. Raises GGUFError, UnsupportedModel, InvalidArgument."""
    encoder: Encoder = family(projector_type(gguf), str(gguf.paths[0]))(gguf)
    if text:
        check_text_model(encoder, text)
    encoder.both_ways = encoder.sees_both_ways(text)
    types, limits = check_weights(gguf, encoder), limits or TokenLimits()
    loads = tuple(Load(s.name, s.shape, types[s.name], MIRRORED) for s in all_weights(encoder))
    shape, sizes = _sized(encoder, device, loads, limits)
    if sizes.largest[0] > (most := device.limits.max_storage_range):

        def binds(n_tokens: int) -> bool:
            return _sized(encoder, device, loads, replace(limits, max_tokens=n_tokens))[1].largest[0] <= most

        n_tokens = largest(1, encoder.config.most_tokens(limits), binds)
        ways = [f"--image-max-tokens {n_tokens}"] if n_tokens >= (limits.min_tokens or 1) else []
        raise InvalidArgument(
            f"{encoder.config.path}: {device.name} reads {most} bytes at once, and pictures of "
            f"{shape.n_rows} patches need {sizes.largest[0]}; use {', or '.join([*ways, ANOTHER_DEVICE])}"
        )
    return ProjectorPlan(encoder, device, limits, loads, shape, sizes, _held(device, loads, shape, sizes))


def _sized(
    encoder: Encoder, device: Device, loads: Sequence[Load], limits: TokenLimits
) -> tuple[StepShape, StepSizes]:
    """Return the step of the largest picture. Raises InvalidArgument for a picture with too many patches."""
    n_patches = encoder.most_patches(encoder.config.most_tokens(limits)) + encoder.n_extra
    if n_patches > MAX_PATCHES:
        raise InvalidArgument(
            f"{encoder.config.path}: pictures of {n_patches} patches; at most {MAX_PATCHES} are "
            "possible; use a smaller --image-max-tokens"
        )
    n_rows = step_rows(encoder, n_patches)
    shape = StepShape(
        n_rows,
        step_kind(encoder, n_rows).n_outputs,
        ((0, 0),),
        encoder.table_widths(),
        n_embd=encoder.config.projection_dim,
        encodes=True,
    )
    traced = [NullDevice("traced", device.limits)]
    cells = Load(f"{CELLS}.weight", (1, n_rows // CELL_BLOCK), "u32", MIRRORED)
    weights: dict[str, Weight] = traced_weights([*loads, cells], traced)
    return shape, measure(traced, partial(encoder.forward, w=Weights(weights)), shape)


def _held(device: Device, loads: Sequence[Load], shape: StepShape, sizes: StepSizes) -> Held:
    held = Held()
    add_loads(held, loads, 0, device)
    held.add("kv", "tables", max(4 * shape.n_rows // CELL_BLOCK, ALIGN))
    held.add("scratch", "scratch", sizes.scratch(0))
    held.add("staging", "staging", sizes.staging(0))
    return held


def step_rows(encoder: Encoder, n_patches: int) -> int:
    """Return how many rows to record for a tile. The number is a multiple of CELL_BLOCK, and of the number of
    patches that become a row."""
    group = math.lcm(CELL_BLOCK, encoder.n_merged)
    return group * bucket(-(-n_patches // group))


def step_kind(encoder: Encoder, n_rows: int) -> StepKind:
    n_outputs = n_rows // encoder.n_merged * encoder.n_parts
    return StepKind(n_rows, n_outputs, Mix.PREFILL, Wanted(hidden=True))


def check_text_model(encoder: Encoder, text: GGUF) -> None:
    """If the projector is for another text model, raise UnsupportedModel with the names of both files."""
    c, arch, files = encoder.config, text.architecture, f"{encoder.config.path} and {text.paths[0]}"
    if arch not in encoder.text_architectures:
        raise UnsupportedModel(
            f"{files} do not match: projectors of type {c.projector!r} are for models of architecture "
            f"{', '.join(encoder.text_architectures)}, and the model's is {arch!r}"
        )
    n_embd, n_deep = text.u32(f"{arch}.embedding_length"), text.u32(f"{arch}.n_deepstack_layers", 0)
    if n_embd != c.projection_dim:
        raise UnsupportedModel(
            f"{files} do not match: the projector's rows have {c.projection_dim} values, the model's "
            f"embeddings {n_embd}; take both files from one model"
        )
    if n_deep != c.n_deepstack:
        raise UnsupportedModel(
            f"{files} do not match: the projector has {c.n_deepstack} deepstack layers, the model {n_deep}"
        )
    if encoder.has_grid and not any(text.ints(f"{arch}.rope.dimension_sections", [])):
        raise UnsupportedModel(
            f"{files} do not match: the model's file has no RoPE sections ({arch}.rope.dimension_sections), "
            "which the heights and widths of images need; convert the model again"
        )
    names = text.strings("tokenizer.ggml.tokens", [])  # A file without a vocabulary is used with token ids.
    if names and (missing := [mark for mark in encoder.marks if mark not in names]):
        raise UnsupportedModel(
            f"{files} do not match: the model's vocabulary lacks {' and '.join(missing)}, which projectors "
            f"of type {c.projector!r} need; take both files from one model"
        )
