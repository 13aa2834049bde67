"""The options of a model and of a generation.

A new option needs an entry in `Keywords`, a field with default and check in `Options`, and a flag with the
same `dest` in tools/flags. The file is long, because each option is described here and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict, Unpack

from vkbackend import env
from vkbackend.checks import choice, finite, optional, plain, refused, switch, whole
from vkbackend.errors import InvalidArgument, VkbackendError
from vkbackend.meta.options import ReduceKeywords
from vkbackend.meta.plan import normalise
from vkbackend.meta.policy import POLICIES
from vkbackend.meta.step_kind import MAX_ADAPTERS
from vkbackend.models.arguments import (
    adapter_files,
    adapter_scales,
    device_list,
    fitted_names,
    layer_count,
    layer_range,
    margin_list,
    mebibytes,
    not_given,
    optional_path,
    override_list,
    path_string,
    scaled_files,
    share_list,
    speculation_list,
    stop_strings,
    unlike,
)
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.grammar.structure import Structure, grammar_text, schema_text, structure_of
from vkbackend.models.rope_options import RopeKeywords, RopeOptions
from vkbackend.models.sampling.params import SamplingKeywords, SamplingParams, logprobs_count
from vkbackend.open_device import RUNTIMES
from vkbackend.ops import CACHE_TYPES, MAX_VEC_ROWS
from vkbackend.options_class import check_fields, option
from vkbackend.step import MAX_ROWS, MAX_RUNS, MAX_SNAPSHOTS

MAX_CONTEXT = 1 << 24
MAX_MIB = 1 << 30
MAX_QUEUE = 1 << 20
MAX_PRIORITY, MAX_DEADLINE_S = 1000, 1e7
DEFAULT_ROWS = 512  # of a step, unless weights of layers are in host memory
MAX_GPU = 1 << 16
MAX_DRAFT = MAX_VEC_ROWS - 1  # A step with drafts has at most MAX_VEC_ROWS rows.
FITTED_DRAFT = 8192  # Context of a draft model that is opened before the model's context is chosen.
ATTENTION = ("causal", "non-causal")
SPLIT_MODES = ("none", "layer", "tensor", "hosts")

File = str | os.PathLike[str]


class _ModelKeywords(TypedDict, total=False):
    devices: str | Sequence[str | int] | None
    """The devices that share the model, as a list or a text such as "0,1". A device is named by its index,
    its UUID or any unique part of its name; `vkbackend devices` lists them. A device that is named twice is
    opened twice. "numpy" is the processor, without Vulkan. None (default): the best device."""
    hostfile: File | None
    """A hostfile: the nodes that run the model together, each with its own devices (docs/hosts.md); replaces
    `devices`. None (default): this machine alone."""
    tensor_split: Iterable[float] | Literal["auto"] | None
    """The share of each device, in any unit: [3, 1] gives the first device three quarters. "auto" measures
    the devices and balances their time. None (default): "auto" if the devices differ, else equal shares."""
    split_mode: str
    """How devices share the model: "tensor" (default; each device has a slice of every matrix), "layer" (each
    device has complete layers), "hosts" (each node has complete layers, in slices on its devices) or "none"
    (only `main_gpu` runs)."""
    main_gpu: int
    """The device of split mode "none", as an index into `devices` (default: 0)."""
    split_policy: str
    """How shares are rounded to slices: "balanced" (default), or "llama.cpp" for its arithmetic."""
    n_ctx: int
    """Tokens per slot (default: 512); 0 for the context that the model was trained with."""
    n_slots: int
    """How many sequences are computed together (default: 1). Further requests wait."""
    n_ubatch: int
    """How many tokens of a prompt are computed at once, 1 to 4,096. A step reads every weight once, so larger
    steps pay where weights are in host memory, and need more scratch memory. 0 (default): 2,048 or 1,024 if
    weights of layers are in host memory and the steps fit, else 512."""
    n_snapshots: int
    """How many earlier states of recurrent layers each slot stores (default: 2). A request that shares only
    the beginning of a slot's text continues from one of these states."""
    kv_cells: int | None
    """The size of the KV cache that all slots share, in positions: at least n_ctx. None (default): n_ctx for
    each slot. When the cache is full, the youngest request waits and is then computed again."""
    prefix_cache: bool
    """True (default): compute the common prefix of requests only once."""
    cache_ram: int
    """MiB of host memory for blocks of the KV cache that leave the devices (docs/engine.md). A later request
    with the same prefix copies them back. 0 (default): none; -1: no limit."""
    cache_disk: str | os.PathLike[str] | None
    """A folder for such blocks, which later processes find again, with any devices. Its files are not
    encrypted. None (default): none."""
    cache_disk_mib: int
    """MiB that all files in `cache_disk` may have (default: 16384). The least recently used are removed."""
    context_shift: bool
    """True: when a sequence fills its context, discard half of the tokens after the first `n_keep`, and
    continue. False (default): the text ends."""
    n_keep: int
    """How many tokens of a prompt a context shift keeps, besides BOS (default: 0); -1 for the complete
    prompt."""
    attention: str | None
    """"causal" or "non-causal" attention of an embedding model: a token attends to the earlier tokens, or to
    all tokens of its text. None (default): as the file says."""
    n_queue: int
    """How many requests may wait for a slot (default: 4096). The next one raises QueueFull."""
    type_k: str
    """Type of the K cache: "f16" (default), "f32", "bf16", "q8_0" or "q4_0"."""
    type_v: str
    """Type of the V cache; the same values and default."""
    n_gpu_layers: int | Literal["all", "auto"] | None
    """How many layers are on the devices, counted from the output, which counts as one layer. None (default)
    or "all": all layers. "auto" or -1: as many as fit. The other layers are in host memory, and every device
    reads its slices from there."""
    override_tensor: str | Sequence[str | tuple[str, str | int]]
    """Where tensors are placed, by name: "REGEX=CPU" or "REGEX=host" for host memory, "REGEX=INDEX" for one
    device, or (regex, target) pairs. The first match wins."""
    moe_cache_mib: float | Literal["auto"]
    """MiB of device memory, on all devices together, for copies of the experts that are used most, if experts
    are in host memory (`override_tensor`). Each device stores its slice of every copied expert. "auto": as
    much as fits. 0.0 (default): no copies."""
    pinned_mib: float | Literal["auto"]
    """MiB of host memory, on all devices together, for pinned weights of layers that are in host memory. The
    weights of the layers that exceed this size stay in the mapped file, and every step copies them through a
    small pinned memory. "auto" (default): all weights are pinned if the system has enough memory, else as
    many as fit."""
    kv_offload: bool
    """False puts the caches in host memory (default: True)."""
    use_mmap: bool
    """True (default): software devices read weights from the mapped file, which must not change while the
    model is open. False: they read a copy."""
    speculation: str | Sequence[str] | None
    """How to guess the next tokens, so that one step verifies several: "ngram" repeats what followed the last
    tokens earlier in the text, and "mtp" uses the multi-token prediction head of the model's file. `draft`
    adds "draft" or "eagle3". Of several, the first that has a guess wins. None (default): no guesses. The
    text does not change (docs/speculation.md)."""
    draft: File | None
    """A .gguf file that drafts: a smaller model of the same vocabulary, which adds "draft" to `speculation`,
    or an EAGLE-3 head that was trained for the model, which adds "eagle3". None (default): no such file."""
    draft_devices: str | Sequence[str | int] | None
    """The devices of the draft model, like `devices`. None (default): the first of `devices`, so that drafts
    need no exchanges."""
    draft_n_gpu_layers: int | Literal["all", "auto"] | None
    """`n_gpu_layers` of the draft model. None (default): all layers."""
    draft_type_k: str
    """Type of the draft model's K cache (default: "f16")."""
    draft_type_v: str
    """Type of the draft model's V cache (default: "f16")."""
    draft_max: int
    """How many tokens a draft has at most (default: 7). Fewer are drafted where few are right."""
    draft_min: int
    """Drafts with fewer tokens are not used (default: 0)."""
    draft_p_min: float
    """A model or head ends its draft before a token that it finds less probable (default: 0.0)."""
    exact: bool
    """True: compute with F32 activations and exchange partial sums as F32. False (default): devices may round
    activations to 8 or 16 bits for speed, and large sums are rounded to 16 bits. With True, a row also has
    the same bits in decoding steps of 1 to 8 rows."""
    runtime: str | None
    """The runtime of the devices: "native" or "kompute". None (default): VKBACKEND_RUNTIME, else native."""
    control_vectors: Sequence[File | tuple[File, float]]
    """Files of control vectors, or (file, scale) pairs. Several vectors are added."""
    control_vector_layer_range: tuple[int, int] | None
    """The first and the last layer that control vectors steer. None (default): all layers in the files."""
    lora: File | Sequence[File | tuple[File, float]] | Mapping[str, File | tuple[File, float]]
    """LoRA adapters: GGUF files or PEFT folders, or (file, scale) pairs, or a dict of these by name. Every
    request uses the adapters with the scales given here (default: 1), unless the request has its own
    `lora`."""
    lora_init_without_apply: bool
    """True: the scales of all adapters are 0 until a request or `set_adapters` changes them (default:
    False)."""
    fit: bool | Sequence[str]
    """True: choose the largest context that fits the devices, and the cache types, slots, shares and
    placement that it needs, of the options that are not given (docs/fit.md). A list names the options to
    choose. False (default): choose nothing."""
    fit_target: float | Sequence[float] | str
    """With `fit`: MiB of each device's memory to leave free, one number or one per device (default: 1024)."""
    fit_ctx: int
    """With `fit`: the shortest context to choose, unless the model's own is shorter (default: 4096)."""


class Keywords(_ModelKeywords, RopeKeywords, ReduceKeywords, total=False):
    """The keywords of `LLM(path, ...)`."""


def cache_type(name: str, value: Any) -> str:
    word = plain(value)
    if not isinstance(word, str) or word not in CACHE_TYPES:
        raise refused(name, value, f"not a cache type; there are: {', '.join(CACHE_TYPES)}")
    return word


def _runtime(name: str, value: Any) -> str | None:
    return None if value is None else choice(RUNTIMES)(name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(RopeOptions):
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
    speculation: tuple[str, ...] = option((), speculation_list)
    draft: str | None = option(None, optional_path("a .gguf file"))
    draft_devices: tuple[str, ...] | None = option(None, device_list)
    draft_n_gpu_layers: int | Literal["auto"] | None = option(None, layer_count)
    draft_type_k: str = option("f16", cache_type)
    draft_type_v: str = option("f16", cache_type)
    draft_max: int = option(MAX_DRAFT, whole(0, 1 << 16))
    draft_min: int = option(0, whole(0, 1 << 16))
    draft_p_min: float = option(0.0, finite(0.0, 1.0))
    exact: bool = option(False, switch)
    runtime: str | None = option(None, _runtime)
    control_vectors: tuple[tuple[str, float], ...] = option((), scaled_files)
    control_vector_layer_range: tuple[int, int] | None = option(None, layer_range)
    lora: tuple[tuple[str, str, float], ...] = option((), adapter_files)
    lora_init_without_apply: bool = option(False, switch)
    fit: tuple[str, ...] = option((), fitted_names)
    fit_target: tuple[float, ...] = option((1024.0,), margin_list)
    fit_ctx: int = option(4096, whole(1, MAX_CONTEXT))

    @property
    def moe_cache_nbytes(self) -> int:
        """Return the bytes for copies of experts, 0 if the size is not yet known."""
        return int(self.moe_cache_mib * 2**20) if isinstance(self.moe_cache_mib, int | float) else 0

    @property
    def with_heads(self) -> bool:
        """Return whether the model includes its multi-token prediction head."""
        return "mtp" in self.speculation

    @property
    def head(self) -> str | None:
        """Return the file of the EAGLE-3 head, which becomes a layer of the model."""
        return self.draft if "eagle3" in self.speculation else None

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
        n_active = sum(1 for _, _, scale in self.adapters if scale)
        if n_active > MAX_ADAPTERS:
            expected = (
                f"at most {MAX_ADAPTERS} adapters can be active; give scales of 0, or lora_init_without_apply"
            )
            raise refused("lora", f"{n_active} adapters", expected)
        self._settle_draft()
        if self.hostfile is not None:
            if self.cache_ram or self.cache_disk is not None:
                given = "cache_ram" if self.cache_ram else "cache_disk"
                expected = "blocks of several machines cannot be kept; leave it out, or the hostfile"
                raise refused(given, getattr(self, given), expected)
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

    def _settle_draft(self) -> None:
        by_file = [kind for kind in ("draft", "eagle3") if kind in self.speculation]
        if by_file and self.draft is None:
            kind = "an EAGLE-3 head" if by_file == ["eagle3"] else "a draft model"
            raise InvalidArgument(f"speculation by {kind} needs its file; give draft (-md FILE)")
        if len(by_file) > 1:
            raise InvalidArgument(
                "draft (-md FILE) is either a model or an EAGLE-3 head; give one of draft and eagle3"
            )
        if self.draft is not None and not by_file:
            kind = "eagle3" if _is_eagle3(self.draft) else "draft"
            object.__setattr__(self, "speculation", (*self.speculation, kind))
        if self.head is not None and self.draft_devices is not None:
            raise refused(
                "draft_devices",
                list(self.draft_devices),
                "an EAGLE-3 head is a layer of the model, on its devices; leave them out",
            )
        if self.head is not None and self.with_heads:
            raise InvalidArgument(
                "a model drafts with its multi-token prediction head or an EAGLE-3 head; give one of mtp and "
                "eagle3"
            )

    @property
    def of_draft(self) -> Options | None:
        """Return the options of the draft model, or None without one. Of several nodes, node 0 drafts."""
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
            speculation=("ngram",),  # Recurrent layers need the state before a draft.
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


def _is_eagle3(path: str) -> bool:
    """Return whether a draft's file is an EAGLE-3 head. Loading reports a file that cannot be read."""
    try:
        with GGUF.open(path) as gguf:
            return gguf.architecture == "eagle3"
    except VkbackendError:
        return False


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


class AnswerKeywords(SamplingKeywords, total=False):
    """The keywords of `Chat.send`."""

    stop: str | Sequence[str] | None
    """Strings that end the text and are not part of it. None (default): none."""
    ignore_eos: bool
    """True: forbid the model's end-of-text tokens, so that the text continues."""
    json_schema: str | bool | Mapping[str, Any] | type | None
    """The answer is JSON of this JSON Schema: its text, a dict, or a pydantic class. This keyword and the
    next four need the extra `grammar` (llguidance); a schema that llguidance does not support is an error.
    None (default): no schema."""
    json_object: bool
    """True: the answer is a JSON object."""
    regex: str | None
    """The complete answer matches this regular expression, in Rust's syntax. None (default): none."""
    lark: str | None
    """The answer follows this grammar, in llguidance's Lark syntax. None (default): none."""
    grammar: str | None
    """The answer follows this grammar in GBNF, llama.cpp's syntax. None (default): none."""


class GenerateKeywords(AnswerKeywords, total=False):
    """The keywords of `LLM.generate` and `LLM.stream`."""

    echo: bool
    """True: the text begins with the prompt."""
    prompt_logprobs: int | None
    """Like `logprobs`, for the tokens of the prompt, which is then computed completely. None (default): no
    log probabilities."""
    parse_special: bool
    """True (default): special tokens in a text, such as <|im_start|>, are parsed as special tokens."""
    cache_prompt: bool
    """False: compute the complete prompt, without cells of earlier requests (default: True)."""
    prompt_progress: bool
    """True: while the prompt is computed, yield chunks without text that have a `progress` (default:
    False)."""
    timings_per_token: bool
    """True: every chunk has timings, not only the last (default: False)."""
    slot: int | None
    """The slot to run in; the request waits until the slot is free. The slot's content is stored until
    another sequence needs the slot or its cells. None (default): the free slot that holds most of the prompt.
    `prefix_cache` describes what is not computed again."""
    n_keep: int | None
    """With `context_shift`: how many tokens of the prompt a shift keeps, besides BOS; -1 for the complete
    prompt. None (default): the model's `n_keep`, which is 0 by default."""
    n_discard: int
    """With `context_shift`: how many tokens a shift discards. 0 (default): half of the tokens that are not
    kept."""
    lora: Mapping[str | int, float] | Sequence[tuple[str | int, float]] | None
    """The adapters of this request and their scales, by name or number, such as {"sql": 0.5}; at most 4.
    Adapters that are not listed are not used, so {} means none. None (default): the model's default
    scales."""
    draft_max: int | None
    """How many tokens a draft has at most; 0: none are drafted. None (default): the model's `draft_max`,
    which is 7 by default."""
    priority: int
    """Which waiting request runs first: the lowest number (default: 0). Each unit counts as ten seconds of
    waiting, so no request waits for ever."""
    deadline_s: float | None
    """How many seconds the request may take, including waiting. After that it ends with DeadlineExceeded.
    None (default): no limit."""


@dataclass(frozen=True, slots=True)
class GenerateOptions(SamplingParams):
    """The checked options of a generation. Raises InvalidArgument."""

    stop: tuple[str, ...] = option((), stop_strings)
    ignore_eos: bool = option(False, switch)
    json_schema: str | None = option(None, schema_text)
    json_object: bool = option(False, switch)
    regex: str | None = option(None, grammar_text)
    lark: str | None = option(None, grammar_text)
    grammar: str | None = option(None, grammar_text)
    echo: bool = option(False, switch)
    prompt_logprobs: int | None = option(None, logprobs_count)
    parse_special: bool = option(True, switch)
    cache_prompt: bool = option(True, switch)
    prompt_progress: bool = option(False, switch)
    timings_per_token: bool = option(False, switch)
    slot: int | None = None  # checked by `LLM`, which knows n_slots
    n_keep: int | None = option(None, optional(whole(-1, MAX_CONTEXT, " (-1: the complete prompt)")))
    n_discard: int = option(0, whole(0, MAX_CONTEXT))
    lora: tuple[tuple[str | int, float], ...] | None = option(None, adapter_scales)
    draft_max: int | None = option(None, optional(whole(0, 1 << 16)))
    priority: int = option(0, whole(-MAX_PRIORITY, MAX_PRIORITY))
    deadline_s: float | None = option(None, optional(finite(0, MAX_DEADLINE_S)))

    @property
    def structure(self) -> Structure | None:
        """Return the schema or grammar of the answer. Raises InvalidArgument for several structures, and
        UnsupportedFeature without llguidance."""
        return structure_of(self.json_schema, self.json_object, self.regex, self.lark, self.grammar)

    @classmethod
    def of(cls, **options: Unpack[GenerateKeywords]) -> GenerateOptions:
        given: dict[str, Any] = {**options}
        return cls(**given)
