"""Device sets for tests of complete models: one to three devices of the first driver, and two drivers in both
orders."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@cache
def device_infos() -> list:  # type: ignore[type-arg]
    from vkbackend.errors import UnsupportedFeature

    try:
        from vkbackend.vulkan.instance import devices

        return devices()
    except UnsupportedFeature:
        return []


def device_params() -> list:  # type: ignore[type-arg]
    params = [pytest.param(i, id=f"{i.index}-{i.driver.split()[0].lower()}") for i in device_infos()]
    none = pytest.param(None, id="none", marks=pytest.mark.skip(reason="no Vulkan device is present"))
    return params or [none]


def with_devices(cases: Iterable[Any], of_one_driver: Iterable[Any]) -> list[Any]:
    """Return parameters (case, device) for a module with CHOOSES_DEVICES (see conftest.py). By default, the
    cases in `of_one_driver` run only on the last driver's device, because the first driver compiles them for
    seconds."""
    every = device_params()
    params = [pair for case in cases for pair in product([_named(case)], every)]
    for case in of_one_driver:
        *others, last = product([_named(case)], every)
        params += [*map(wide, others), last]
    return params


def _named(case: Any) -> Any:
    return pytest.param(case, id=repr(case))


_N = len(device_infos())
if _N:
    import kept_devices

    kept_devices.install()
two_drivers = pytest.mark.skipif(_N < 2, reason=f"needs devices of two drivers, {_N} present")
one_driver = pytest.mark.skipif(_N < 1, reason="no Vulkan device is present")
QUICKEST = ["0" if _N else "numpy"]  # a device for tests that only need some text
DEVICE_SETS = [
    pytest.param(spec.split(","), id=spec, marks=two_drivers if "1" in spec else one_driver)
    for spec in ("0", "0,0", "0,0,0", "0,1", "1,0")
]
MULTI = DEVICE_SETS[1:]
_SETS = {p.id: p for p in DEVICE_SETS} | {
    f"numpy*{n}": pytest.param(["numpy"] * n, id=f"numpy*{n}") for n in (1, 2, 3)
}
# Sets of one device, of two, and of three. In each row of in_turn(), at least one set has Vulkan devices.
SIZES = [
    [_SETS[id_] for id_ in ids]
    for ids in (("numpy*1", "0"), ("numpy*2", "0,1", "0,0", "1,0"), ("0,0,0", "numpy*3"))
]


def wide(param: Any) -> Any:
    return pytest.param(*param.values, id=param.id, marks=[*param.marks, pytest.mark.wide])


def product(rows: Iterable[Any], columns: Iterable[Any]) -> list[Any]:
    params = []
    for row, column in itertools.product(map(_parameter, rows), map(_parameter, columns)):
        marks = [*row.marks, *column.marks]
        params.append(pytest.param(*row.values, *column.values, id=f"{row.id}-{column.id}", marks=marks))
    return params


def some(params: Iterable[Any], every: int) -> list[Any]:
    """Mark parameters as wide, except parameters 0, `every`, 2 * `every` and so on."""
    return [p if i % every == 0 else wide(p) for i, p in enumerate(map(_parameter, params))]


def only(params: Iterable[Any], *ids: str) -> list[Any]:
    """Mark parameters as wide, except the parameters with the given ids."""
    params = [*map(_parameter, params)]
    assert {*ids} <= {p.id for p in params}, "an id belongs to no parameter"
    return [p if p.id in ids else wide(p) for p in params]


def covering(rows: Sequence[Any], columns: Sequence[Any], each: int = 1) -> list[Any]:
    """Return all pairs of a row and a column. Most pairs are marked as wide. By default, each row runs with
    `each` columns, and each column with at least one row."""
    assert len(rows) * each >= len(columns) >= each, "some column is met by no row"
    params = product(rows, columns)
    for i in range(len(rows)):
        met = {(i * each + k) % len(columns) for k in range(each)}
        for j in set(range(len(columns))) - met:
            params[i * len(columns) + j] = wide(params[i * len(columns) + j])
    return params


def in_turn(rows: Iterable[Any], columns: Iterable[Any], each: int = 1) -> list[Any]:
    """Pair each row with `each` columns: the first row with the first columns, the second with the next, and
    so on. Each column is in at least one pair."""
    rows, columns = [*rows], [*columns]
    assert len(rows) * each >= len(columns) >= each, "some column is met by no row"
    chosen = [[columns[(i * each + k) % len(columns)] for k in range(each)] for i in range(len(rows))]
    return [pair for row, of_row in zip(rows, chosen, strict=True) for pair in product([row], of_row)]


def of_each_size(rows: Iterable[Any]) -> list[Any]:
    """Pair each row with a set of one device, a set of two, and a set of three."""
    rows = [*rows]
    return [pair for sets in SIZES for pair in in_turn(rows, sets)]


def all_wide_but(quick: Sequence[Any], params: Iterable[Any]) -> list[Any]:
    """Return the parameters in `quick`, then all other parameters, which are marked as wide."""
    ids = {p.id for p in quick}
    return [*quick, *(wide(p) for p in params if p.id not in ids)]


def device_set(id_: str) -> Any:
    return _SETS[id_]


def _parameter(item: Any) -> Any:
    return item if isinstance(item, type(pytest.param())) else pytest.param(item, id=str(item))


def for_every_runtime(param: Any, wide: bool = False) -> Any:
    """Mark a parameter for every runtime. If `wide`, all runtimes except the native runtime need --all."""
    return pytest.param(*param.values, id=param.id, marks=[*param.marks, pytest.mark.runtimes(wide=wide)])


LAYER = [
    folder / "VkLayer_khronos_validation.json"
    for folder in map(Path, ("/usr/share/vulkan/explicit_layer.d", "/etc/vulkan/explicit_layer.d"))
]
needs_layer = pytest.mark.skipif(
    not any(path.exists() for path in LAYER) and "VK_LAYER_PATH" not in os.environ,
    reason="the Khronos validation layer is not installed (apt-get install vulkan-validationlayers)",
)


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    """Return the normalised mean squared error. NaN and infinity fail."""
    assert got.shape == want.shape and np.isfinite(got).all(), "shape differs or values are not finite"
    got, want = got.astype(np.float64), want.astype(np.float64)
    return float(((got - want) ** 2).sum() / (want**2).sum())
