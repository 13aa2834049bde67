"""Writes the rows of images of a step for all devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vkbackend.meta.mesh import Mesh
from vkbackend.step import StepParams


def write_images(
    mesh: Mesh,
    rows: Sequence[tuple[int, np.ndarray]],
    params: StepParams,
    second: StepParams | None,
    n_rows: int,
) -> None:
    """`rows` is as in BatchImages. `second` holds the parameters of the second half, if there is one. A row
    of an image gets the type 1 + its index in its half of the step. Other rows get 0."""
    if not rows:
        return
    types = np.zeros(n_rows, np.uint16)
    for first, values in rows:
        types[first : first + len(values)] = np.arange(1 + first, 1 + first + len(values))
    n = params.n_rows
    params.types[:n] = types[:n]
    if second:
        second.types[: n_rows - n] = np.where(types[n:], types[n:] - n, 0)
    mesh.write_images(rows, n if second else 0)
