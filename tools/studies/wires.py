"""Measures the error that --reduce-type adds to logits: `python -m vkbackend.tools.studies.wires -dev 0,0`.

Runs random tokens through the first layers of a synthetic model, on the first device alone, then on all
devices with each format of partial sums. Prints the normalised mean squared error (NMSE) of the logits
relative to one device.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

from vkbackend.checks import whole_number
from vkbackend.models.arguments import device_list
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.options import Options
from vkbackend.step import Run
from vkbackend.tools.measure.synthetic import Synthetic
from vkbackend.tools.measure.turns import exit_on_errors, table
from vkbackend.wire import FORMATS


def logits(
    gguf: Synthetic, tokens: list[int], cache: str, devices: tuple[str, ...], **how: Any
) -> np.ndarray:
    n = len(tokens)
    options = Options.of(
        gguf.paths[0],
        devices=devices,
        tensor_split=[1] * len(devices),
        n_ctx=n,
        n_ubatch=n,
        type_k=cache,
        type_v=cache,
        **how,
    )
    runner = Runner(options, gguf)
    try:
        return runner.step(tokens, [Run(0, 0, n, 0)], range(n)).astype(np.float64)
    finally:
        runner.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("-m", "--model", default="llama-8b:Q4_0", metavar="SHAPE:TYPE", help="(default: llama-8b:Q4_0)")
    add("-dev", "--device", default="0,0", metavar="LIST", help="(default: 0,0)")
    add("--layers", type=int, default=4, metavar="N", help="(default: 4)")
    add("--rows", type=int, default=24, metavar="N", help="tokens (default: 24)")
    add("--cache", default="f16", metavar="TYPE", help="type of the K and V cache (default: f16)")
    args = parser.parse_args()
    with exit_on_errors():
        gguf = Synthetic(args.model, whole_number("--layers", args.layers, 1, 1000))
        rows = whole_number("--rows", args.rows, 1, 512)
        devices = device_list("--device", args.device) or ()
        n_vocab = gguf.tensors["token_embd.weight"].shape[0]
        tokens = np.random.default_rng(0).integers(0, n_vocab, rows).tolist()
        want = logits(gguf, tokens, args.cache, devices[:1])
        measured: list[list[object]] = []
        for wire in FORMATS:
            off = logits(gguf, tokens, args.cache, devices, reduce_type=wire) - want
            measured.append([wire, f"{np.mean(off * off) / np.mean(want * want):.2g}"])
        table("logits of all devices against one device", ("wire", "NMSE"), measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
