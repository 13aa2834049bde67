"""The keywords of `LLM(path, ...)`. `Options` in options.py has their defaults and checks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypedDict

from vkbackend.meta.options import ReduceKeywords
from vkbackend.models.draft_options import DraftKeywords
from vkbackend.models.rope_options import RopeKeywords

File = str | os.PathLike[str]


class ModelKeywords(TypedDict, total=False):
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
    """Type of the K cache: "f16" (default), "f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0" or
    "iq4_nl"."""
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
    exact: bool
    """True: compute with F32 activations and exchange partial sums as F32. False (default): devices may round
    activations to 8 or 16 bits for speed, and large sums are rounded to 16 bits. With True, a row also has
    the same bits in decoding steps of 1 to 8 rows."""
    runtime: str | None
    """The runtime of the devices: "native" or "kompute". None (default): VKBACKEND_RUNTIME, else native."""
    mmproj: File | None
    """The .gguf file of the model's projector (mmproj), which turns images into rows that the model reads.
    None (default): the model reads only text."""
    mmproj_device: str | int | None
    """The device of the projector, named as in `devices`; "none" or "numpy": the processor. None (default):
    the fastest of `devices` whose memory holds both it and the model."""
    image_min_tokens: int | None
    """How many rows an image has at least, if the projector accepts several sizes: smaller images are
    enlarged. None (default): as the projector's family does."""
    image_max_tokens: int | None
    """How many rows an image has at most, if the projector accepts several sizes: larger images are shrunk.
    None (default): as the projector's family does."""
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


class Keywords(ModelKeywords, DraftKeywords, RopeKeywords, ReduceKeywords, total=False):
    """The keywords of `LLM(path, ...)`."""
