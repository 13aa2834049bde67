"""`vkbackend models`: list the architectures that run, and which features each supports.

Columns are derived from the weights, caches and states of a small model. The flag --json names each column's
tests (`pytest --all`). The flag --md prints the tables of docs/architectures.md. Encoders are in a separate
table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np

from vkbackend.errors import VkbackendError
from vkbackend.meta.plan import Plan
from vkbackend.meta.split import holders
from vkbackend.models.architectures.base import Model
from vkbackend.models.architectures.memory_specs import StateSpec, kv_of
from vkbackend.models.architectures.registry import ARCHITECTURES, ENCODERS, MODELS
from vkbackend.models.options import Options
from vkbackend.models.placement.layout import lay_out
from vkbackend.tools.console import console, table, write_json
from vkbackend.tools.measure.sketch import sketches

TESTS = "tests/models/architectures/test_architectures.py"
PROOFS = {  # The tests of each column. A test name without a file is in the file TESTS.
    "tensor parallel": (
        "test_oracles_on_numpy",
        "test_oracles_on_vulkan",
        "test_three_devices_equal_one",
        "test_devices_equal_one",
        "test_two_drivers_equal_one",
    ),
    "layer split": ("test_layers_on_different_devices",),
    "state save": ("test_a_saved_slot_continues_on_other_devices",),
    "control vectors": (
        "test_control_vectors",
        "tests/models/placement/test_control_vectors.py::test_a_zero_vector_equals_none_bit_by_bit",
    ),
    "experts": (
        "test_two_drivers_choose_the_same_experts",
        "tests/models/architectures/test_mixture.py::test_all_devices_break_near_ties_alike",
    ),
    "sliding window": (
        "test_oracles_on_numpy",
        "tests/models/architectures/test_windows.py::test_rings_equal_a_full_mask",
        "tests/models/architectures/test_windows.py::test_a_saved_ring_continues_on_other_devices",
    ),
    "recurrent": (
        "test_a_second_sequence_changes_nothing",
        "tests/models/placement/test_recurrent_state.py::test_a_slot_that_goes_back_equals_a_new_slot",
        "tests/models/placement/test_recurrent_state.py::test_a_part_of_a_state_is_refused",
        "tests/vkbackend/ops/test_gdn_oracle.py::test_twins",
        "tests/vkbackend/ops/test_gdn_oracle.py::test_shaders",
    ),
}
DIMS = {
    "heads": "heads",
    "k_heads": "key heads",
    "ssm_heads": "ssm heads",
    "ffn": "ffn",
    "experts": "experts",
}


@dataclass(frozen=True, slots=True)
class Row:
    """`split_by` names the dimensions that tensor parallelism splits."""

    name: str  # general.architecture
    models: str
    split_by: tuple[str, ...]
    layer_split: bool
    whole_slots: bool  # states have no positions
    control_vectors: bool
    experts: bool
    windows: bool
    recurrent: bool

    @property
    def state_save(self) -> str:
        return "whole slots" if self.whole_slots else "yes"

    def cells(self) -> dict[str, str]:
        return {
            "architecture": self.name,
            "models": self.models,
            "tensor parallel": ", ".join(self.split_by) or "-",
            "layer split": _yes(self.layer_split),
            "state save": self.state_save,
            "control vectors": _yes(self.control_vectors),
            "experts": _yes(self.experts),
            "sliding window": _yes(self.windows),
            "recurrent": _yes(self.recurrent),
        }


def _yes(flag: bool) -> str:
    return "yes" if flag else "-"


@cache
def row_of(name: str) -> Row:
    model = sketches(name)[0]
    memories = [model.kv(il) for il in range(model.n_layer)]
    recurrent = any(isinstance(spec, StateSpec) for spec in memories)
    model.control = {1: np.zeros(model.n_embd, np.float32)}
    return Row(
        name,
        MODELS[name],
        split_by(name),
        layer_split=split_by_layers(model),
        whole_slots=recurrent,  # A recurrent state cannot be rewound.
        control_vectors=any(spec.values is model.control[1] for spec in model.weights()),
        experts=model.n_used > 0,
        windows=any(kv.window > 0 for kv in map(kv_of, memories) if kv),
        recurrent=recurrent,
    )


def plans_of(model: Model, split_mode: str = "tensor") -> list[Plan]:
    """Return the layers' plans on two devices, or an empty list if the model refuses this split mode."""
    types = {spec.name: "f32" for spec in model.weights()}
    try:
        return lay_out(model, types, 2, Options.of("a sketch", n_ctx=64, split_mode=split_mode)).plans
    except VkbackendError:
        return []


def split_by(name: str) -> tuple[str, ...]:
    shared = set()
    for plan in [plan for model in sketches(name) for plan in plans_of(model)]:
        tiles = [*plan.ranges.items(), *(("experts", ranges) for ranges in plan.experts)]
        shared |= {dim for dim, ranges in tiles if len(holders(ranges)) == 2}
    return tuple(word for dim, word in DIMS.items() if dim in shared)


def split_by_layers(model: Model) -> bool:
    tiles = [[*plan.ranges.values(), *plan.experts] for plan in plans_of(model, split_mode="layer")]
    owners = [{d for ranges in of_layer for d in holders(ranges)} for of_layer in tiles]
    return all(len(devices) == 1 for devices in owners) and set().union(*owners) == {0, 1}


def proofs() -> dict[str, list[str]]:
    return {
        column: [name if "::" in name else f"{TESTS}::{name}" for name in names]
        for column, names in PROOFS.items()
    }


def encoders() -> list[dict[str, str]]:
    return [{"encoder": name, "models": models} for name, models in ENCODERS.items()]


def markdown(cells: Sequence[Mapping[str, str]]) -> str:
    lines = [list(cells[0]), ["---"] * len(cells[0]), *(list(row.values()) for row in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json", action="store_true", help="print a JSON list: the columns of the table, and the tests"
    )
    form.add_argument("--md", action="store_true", help="print the table as Markdown")


def run(args: argparse.Namespace) -> None:
    rows = [row_of(name) for name in ARCHITECTURES]
    if args.json:
        write_json(
            [asdict(row) | {"state_save": row.state_save, "tests": proofs()} for row in rows], indent=1
        )
        return
    out = console()
    if args.md:
        tables = markdown([row.cells() for row in rows]), markdown(encoders())
        out.print("\n\n".join(tables), markup=False, soft_wrap=True)
        return
    for cells in ([row.cells() for row in rows], encoders()):
        out.print(table("", list(cells[0]), [list(row.values()) for row in cells]), "")
    out.print(f"{len(ARCHITECTURES)} architectures and {len(ENCODERS)} encoders", markup=False)
    out.print(f"tests: {TESTS} --all -k ARCHITECTURE; --json names the tests of each column", markup=False)


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["models", *sys.argv[1:]]))
