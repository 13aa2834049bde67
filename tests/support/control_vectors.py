"""Files of control vectors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf as gguf_py
import numpy as np


def write_vectors(path: Path, vectors: Mapping[int | str, np.ndarray], arch: str = "controlvector") -> Path:
    writer = gguf_py.GGUFWriter(path, arch)
    writer.add_string("controlvector.model_hint", "tiny")
    writer.add_uint32("controlvector.layer_count", len(vectors))
    for il, vector in vectors.items():
        writer.add_tensor(il if isinstance(il, str) else f"direction.{il}", vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
