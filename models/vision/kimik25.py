"""kimik25 (Kimi K2.5): kimivl.py with other special tokens around the rows. In the file, q and k have another
order: the first half of a head rotates by the column, the second half by the line.
"""

from __future__ import annotations

import numpy as np

from vkbackend.models.vision.kimivl import Model as KimiVL


class Model(KimiVL):
    marks = ("<|media_begin|>", "<|media_content|>", "<|media_end|>")

    def rope(self, rows: np.ndarray) -> np.ndarray:
        return rows
