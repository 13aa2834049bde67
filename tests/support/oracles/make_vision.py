"""Makes `golden/vision.npz`, the rows of the fixtures in vision.py.

    PYTHONPATH=tests/support python tests/support/oracles/make_vision.py [NAME ...]

Needs torch and transformers. With names, only these fixtures are computed; others keep their rows.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from oracles import hf, hf_vision
from oracles.vision import BUILDERS, build
from places import GOLDEN

PATH = GOLDEN / "vision.npz"


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    if PATH.exists() and sys.argv[1:]:
        with np.load(PATH) as stored:
            arrays = {name: stored[name] for name in stored.files if name in BUILDERS}
    for name in sys.argv[1:] or BUILDERS:
        arrays[name] = hf_vision.ROWS[name](build(name))
        print(f"{name:16} {arrays[name].shape} rms {np.sqrt(np.mean(arrays[name] ** 2)):.3f}")
    np.savez_compressed(PATH, about=json.dumps({"made by": hf.versions()}), **arrays)


if __name__ == "__main__":
    main()
