"""Makes `golden/vision.npz`, the rows of the fixtures in vision.py.

    PYTHONPATH=tests/support python tests/support/oracles/make_vision.py [NAME ...]

Needs torch, transformers and xllamacpp. With NAME, only these fixtures are computed, and other fixtures keep
their rows. Both programs must agree if libmtmd implements the same computation. libmtmd differs in two
encoders: it uses quick GELU in Gemma 4's, and reads InternVL's table of positions from the second row.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from oracles import hf, hf_vision, libmtmd, llama_cpp
from oracles.make_golden import nmse
from oracles.vision import BUILDERS, build
from places import GOLDEN

PATH = GOLDEN / "vision.npz"
BOUND = 1e-6  # llama.cpp computes GELU with an F16 table


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    if PATH.exists() and sys.argv[1:]:
        with np.load(PATH) as stored:
            arrays = {name: stored[name] for name in stored.files if name in BUILDERS}
    for name in sys.argv[1:] or BUILDERS:
        arrays[name] = hf_vision.ROWS[name](build(name))
        apart = nmse(libmtmd.rows(build(name)), arrays[name]) if name in libmtmd.TEXTS else None
        assert apart is None or apart <= BOUND, f"{name}: NMSE {apart:.1e}"
        against = "" if apart is None else f"NMSE against libmtmd {apart:.1e}"
        print(f"{name:16} {arrays[name].shape} {against}")
    about = {"made by": hf.versions(), "agrees with": llama_cpp.versions()}
    np.savez_compressed(PATH, about=json.dumps(about), **arrays)


if __name__ == "__main__":
    main()
