"""Writes the options that were chosen as flags."""

from __future__ import annotations

import shlex
from dataclasses import replace

from vkbackend.models.arguments import EXPERTS
from vkbackend.models.options import DEFAULT_ROWS, Options


def flags(options: Options, asked: Options) -> str:
    """Return the options named in `asked.fit` as words of a command line. `asked` are the options before they
    were chosen."""
    words, chosen = list[str](), asked.fit

    def add(name: str, flag: str, value: object = "", *, shown: bool = True) -> None:
        if name in chosen and shown:
            words.extend([flag, str(value)] if value != "" else [flag])

    add("n_ctx", "-c", options.n_ctx)
    add("n_slots", "-np", options.n_slots, shown=asked.n_slots > 1)
    add("kv_cells", "--kv-cells", options.kv_cells, shown=options.kv_cells is not None)
    add("type_k", "-ctk", options.type_k)
    add("type_v", "-ctv", options.type_v)
    several = len(options.devices or ()) > 1 and options.shares is not None
    add("tensor_split", "-ts", ",".join(f"{share:g}" for share in options.shares or ()), shown=several)
    add("n_gpu_layers", "-ngl", "all" if options.n_gpu_layers is None else options.n_gpu_layers)
    on_host = options.override_tensor == ((EXPERTS, "CPU"),)
    add("override_tensor", "-cmoe", shown=on_host)
    add("moe_cache_mib", "--moe-cache-mib", options.moe_cache_mib, shown=bool(options.moe_cache_mib))
    add("n_ubatch", "-ub", options.n_ubatch, shown=options.n_ubatch not in (0, DEFAULT_ROWS))
    return shlex.join(words)


def fit_note(options: Options, asked: Options) -> str:
    return f"fit: {flags(options, asked) or 'nothing was left to choose'}"


def of_encoder(asked: Options) -> Options:
    """Leave out the options that follow from an encoder's context."""
    return replace(asked, fit=tuple(name for name in asked.fit if name in ("n_ctx", "tensor_split")))
