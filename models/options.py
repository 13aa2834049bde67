"""The options of a model.

The guide docs/guides/extending.md lists the steps to add an option.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Unpack

from vkbackend import env
from vkbackend.checks import choice, optional, plain, refused, switch, whole
from vkbackend.errors import InvalidArgument
from vkbackend.meta.plan import normalise
from vkbackend.meta.policy import POLICIES
from vkbackend.meta.step_kind import MAX_ADAPTERS
from vkbackend.models.arguments import (
    adapter_files,
    cache_type,
    device_list,
    fitted_names,
    layer_count,
    layer_range,
    margin_list,
    mebibytes,
    not_given,
    one_device,
    optional_path,
    override_list,
    path_string,
    scaled_files,
    share_list,
    unlike,
)
from vkbackend.models.draft_options import DraftOptions
from vkbackend.models.keywords import File, Keywords
from vkbackend.models.vision.config import TokenLimits
from vkbackend.open_device import RUNTIMES
from vkbackend.options_class import check_fields, option
from vkbackend.step import MAX_ROWS, MAX_RUNS, MAX_SNAPSHOTS

MAX_CONTEXT = 1 << 24
MAX_MIB = 1 << 30
MAX_QUEUE = 1 << 20
DEFAULT_ROWS = 512  # rows of a step, unless weights of layers are in host memory
MAX_GPU = 1 << 16
FITTED_DRAFT = 8192  # Context of a draft model that is opened before the model's context is chosen.
ATTENTION = ("causal", "non-causal")
SPLIT_MODES = ("none", "layer", "tensor", "hosts")


def _runtime(name: str, value: Any) -> str | None:
    return None if value is None else choice(RUNTIMES)(name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(DraftOptions):
    """The checked options of a model. `Keywords` describes the fields.

    Raises InvalidArgument before any file or device is opened.
    """

    path: str = field(kw_only=False, metadata={"check": path_string})
    devices: tuple[str, ...] | None = option(None, device_list)
    hostfile: str | None = option(None, optional_path("a hostfile"))
    tensor_split: tuple[float, ...] | Literal["auto"] | None = option(None, share_list)
    split_mode: str = option("tensor", choice(SPLIT_MODES))
    main_gpu: int = option(0, whole(0, MAX_GPU))
    split_policy: str = option("balanced", choice(POLICIES))
    n_ctx: int = option(512, whole(0, MAX_CONTEXT, " (0: the model's own)"))
    n_slots: int = option(1, whole(1, MAX_RUNS))
    n_ubatch: int = option(0, whole(0, MAX_ROWS, " (0: chosen by memory)"))
    n_snapshots: int = option(2, whole(0, MAX_SNAPSHOTS))
    kv_cells: int | None = option(None, optional(whole(1, MAX_CONTEXT * MAX_RUNS, " (None: n_ctx a slot)")))
    prefix_cache: bool = option(True, switch)
    cache_ram: int = option(0, whole(-1, MAX_MIB, " MiB (-1: no limit)"))
    cache_disk: str | None = option(None, optional_path("a folder"))
    cache_disk_mib: int = option(16_384, whole(1, MAX_MIB, " MiB"))
    context_shift: bool = option(False, switch)
    n_keep: int = option(0, whole(-1, MAX_CONTEXT, " (-1: the complete prompt)"))
    attention: str | None = option(None, optional(choice(ATTENTION)))
    n_queue: int = option(4096, whole(1, MAX_QUEUE))
    type_k: str = option("f16", cache_type)
    type_v: str = option("f16", cache_type)
    n_gpu_layers: int | Literal["auto"] | None = option(None, layer_count)
    override_tensor: tuple[tuple[str, str], ...] = option((), override_list)
    moe_cache_mib: float | Literal["auto"] = option(0.0, mebibytes)
    pinned_mib: float | Literal["auto"] = option("auto", mebibytes)
    kv_offload: bool = option(True, switch)
    use_mmap: bool = option(True, switch)
    exact: bool = option(False, switch)
    runtime: str | None = option(None, _runtime)
    mmproj: str | None = option(None, optional_path("a projector's .gguf file"))
    mmproj_device: str | None = option(None, one_device)
    image_min_tokens: int | None = option(None, optional(whole(1, MAX_ROWS)))
    image_max_tokens: int | None = option(None, optional(whole(1, MAX_ROWS)))
    control_vectors: tuple[tuple[str, float], ...] = option((), scaled_files)
    control_vector_layer_range: tuple[int, int] | None = option(None, layer_range)
    lora: tuple[tuple[str, str, float], ...] = option((), adapter_files)
    lora_init_without_apply: bool = option(False, switch)
    fit: tuple[str, ...] = option((), fitted_names)
    fit_target: tuple[float, ...] = option((1024.0,), margin_list)
    fit_ctx: int = option(4096, whole(1, MAX_CONTEXT))

    @property
    def image_limits(self) -> TokenLimits:
        return TokenLimits(self.image_min_tokens, self.image_max_tokens)

    @property
    def moe_cache_nbytes(self) -> int:
        """Return the bytes for copies of experts, 0 if the size is not yet known."""
        return int(self.moe_cache_mib * 2**20) if isinstance(self.moe_cache_mib, int | float) else 0

    def __post_init__(self) -> None:
        check_fields(self)
        _ = self.rope_factor
        if self.exact and self.reduce_type in ("bf16", "f16"):
            raise refused(
                "reduce_type",
                self.reduce_type,
                "rounds partial sums, and exact=True rounds nothing; leave one out",
            )
        if (self.exact or env.exact()) and self.reduce_type == "auto":
            object.__setattr__(self, "reduce_type", "f32")
        if (self.image_min_tokens or 0) > (self.image_max_tokens or MAX_ROWS):
            expected = f"at most image_max_tokens, which is {self.image_max_tokens}"
            raise refused("image_min_tokens", self.image_min_tokens, expected)
        if self.mmproj is not None and self.context_shift:
            expected = "positions of images cannot be shifted; leave it out, or mmproj"
            raise refused("context_shift", self.context_shift, expected)
        n_active = sum(1 for _, _, scale in self.adapters if scale)
        if n_active > MAX_ADAPTERS:
            expected = (
                f"at most {MAX_ADAPTERS} adapters can be active; give scales of 0, or lora_init_without_apply"
            )
            raise refused("lora", f"{n_active} adapters", expected)
        self.settle_draft()
        if self.hostfile is not None:
            if self.devices is not None:
                expected = "the hostfile says which devices each node has (dev=0,1); leave one out"
                raise refused("devices", list(self.devices), expected)
            return  # the hostfile's devices are checked later
        n = len(self.devices or [None])
        shares = self.shares
        if shares is not None and len(shares) != n:
            raise refused(
                "tensor_split",
                list(shares),
                f"{len(shares)} shares for {n} devices; give one for each"
                if self.devices
                else f"{len(shares)} shares, but without -dev the model runs on one device, the best one; "
                "name the devices, for example -dev 0,1",
            )
        if not self.main_gpu < n:
            raise InvalidArgument(
                f"main device {self.main_gpu} (-mg) is not one of the {n} that were given; the first is 0"
            )
        if self.control_vector_layer_range is not None and not self.control_vectors:
            raise refused(
                "control_vector_layer_range",
                self.control_vector_layer_range,
                "a range without control vectors; give files of them",
            )

    @property
    def of_draft(self) -> Options | None:
        """Return the options of the draft model, or None without one. In a group of nodes, node 0 drafts."""
        if self.draft is None or self.head is not None:
            return None
        here = [word.removeprefix("0/") for word in self.devices or () if self.node_of(word) in ("", "0")]
        first = tuple(here[:1]) or None
        return Options(
            self.draft,
            devices=self.draft_devices or first,
            n_ctx=FITTED_DRAFT if "n_ctx" in self.fit else self.n_ctx,
            n_slots=self.n_slots,
            n_ubatch=self.n_ubatch,
            n_gpu_layers=self.draft_n_gpu_layers,
            type_k=self.draft_type_k,
            type_v=self.draft_type_v,
            speculation=("ngram",),  # Recurrent layers of a draft model need only the state before a draft.
            draft_max=0,
            use_mmap=self.use_mmap,
            exact=self.exact,
            runtime=self.runtime,
        )

    @classmethod
    def of(cls, path: File, **options: Unpack[Keywords]) -> Options:
        given: dict[str, Any] = {"path": path, **options}
        if plain(options.get("fit")) is True:
            given["fit"] = not_given(options)
        return cls(**given)

    @property
    def adapters(self) -> tuple[tuple[str, str, float], ...]:
        """Return (name, path, default scale) of each adapter."""
        if not self.lora_init_without_apply:
            return self.lora
        return tuple((name, path, 0.0) for name, path, _ in self.lora)

    @property
    def shares(self) -> tuple[float, ...] | None:
        """Return the specified or measured shares, or None for equal shares."""
        return None if self.tensor_split == "auto" else self.tensor_split

    @property
    def nodes(self) -> tuple[str, ...] | None:
        """Return the node of each device named NODE/DEVICE, or None without named devices."""
        return tuple(self.node_of(word) for word in self.devices or ()) or None

    @staticmethod
    def node_of(word: str) -> str:
        """Return the node of a device named NODE/DEVICE, or "" for other names."""
        node, _, device = word.partition("/")
        return node if device and node.isdecimal() else ""

    @property
    def auto_split(self) -> bool:
        wanted = self.tensor_split is None and self.split_mode in ("tensor", "hosts") and unlike(self.devices)
        return self.tensor_split == "auto" or wanted


def with_a_share(options: Options) -> Options:
    """Drop devices whose share is 0, because they would only repeat work."""
    devices = options.devices
    if not devices:
        return options
    if options.split_mode == "none":
        return replace(options, devices=(devices[options.main_gpu],), tensor_split=None, main_gpu=0)
    if options.override_tensor or options.split_policy != "balanced":
        return options
    shares = normalise(options.shares, len(devices))
    kept = [d for d, share in enumerate(shares) if share]
    split, margins = options.tensor_split, options.fit_target
    if options.shares:
        split = tuple(options.shares[d] for d in kept)
    if len(margins) == len(devices):
        margins = tuple(margins[d] for d in kept)
    of_kept = tuple(devices[d] for d in kept)
    return replace(options, devices=of_kept, tensor_split=split, fit_target=margins)
