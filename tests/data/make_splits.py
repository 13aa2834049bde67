"""Makes `splits.json`: llama.cpp's splits of random and real models, from the oracle of its split arithmetic.

PYTHONPATH=tests/support python tests/data/make_splits.py ../shared/oracles/split_oracle.py
"""

from __future__ import annotations

import json
import sys
from dataclasses import astuple
from pathlib import Path
from types import ModuleType
from typing import Any

from split_cases import BLOCKS, answers, cases, load_oracle

DATA = Path(__file__).resolve().parent
N_CASES = 400  # enough that every format occurs with keys as long as values, and with other keys
TYPES, N_DEVICES = ("F16", "Q8_0", "Q4_K"), (2, 3, 4)


def of_model(oracle: ModuleType, name: str, hp: Any) -> dict[str, Any]:
    """Return attention by layer, and [block, devices, dimension, FFN columns, layer, units by device] for
    each split."""
    attention = [[hp.n_head, hp.kv(il), hp.k(il), hp.v(il)] for il in range(hp.n_layer)]
    kinds = [(hp.is_swa(il), hp.kv(il)) for il in range(hp.n_layer)]
    rows = []
    for dtype in TYPES:
        for n in N_DEVICES:
            n_ff = hp.n_ff or hp.n_ff_exp
            if any(width % BLOCKS[dtype] for width in (n_ff, *(h * v for h, _, _, v in attention))):
                continue

            def units(matrix: str, il: int, length: int, unit: int = 1) -> list[int]:
                split = oracle.split(hp, f"blk.{il}.{matrix}.weight", length, dtype, n)  # noqa: B023
                return [size // unit for size in oracle.total(split, n)]  # noqa: B023

            for il in sorted({kinds.index(kind) for kind in kinds}):
                _, kv, k, _ = attention[il]
                rows.append([BLOCKS[dtype], n, "kv_heads", n_ff, il, units("attn_k", il, kv * k, k)])
            for width in {hp.n_ff, hp.n_ff_exp} - {0}:
                if not width % BLOCKS[dtype]:
                    rows += [
                        [BLOCKS[dtype], n, "ffn", width, il, units("ffn_down", il, width)] for il in range(n)
                    ]
    swa = [hp.is_swa(il) for il in range(hp.n_layer)]
    return {"name": name, "attention": attention, "swa": swa, "splits": rows}


def main() -> None:
    oracle = load_oracle(Path(sys.argv[1]))
    answer, kept = answers(oracle), []
    for case in cases(N_CASES, 1):
        fmt, layers, n_vocab, n, split = case
        sizes = astuple(layers[0].attention), astuple(layers[0].ffn)
        kept.append([fmt, *sizes, len(layers), n_vocab, n, split, answer(case)])
    models = [of_model(oracle, name, hp) for name, hp in oracle.MODELS.items() if not hp.recr]
    path = DATA / "splits.json"
    path.write_text(
        json.dumps({"cases": kept, "models": models}, separators=(",", ":")) + "\n", encoding="utf-8"
    )
    print(
        f"{path.name} {path.stat().st_size} bytes, {sum(len(m['splits']) for m in models)} splits of models"
    )


if __name__ == "__main__":
    main()
