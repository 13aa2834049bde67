"""`vkbackend models`: the architectures that run, and what of each works.

The table is made from the model files. Every row is proven by tests/models/test_architectures.py, of which
`-k NAME` runs one architecture and `--all` all of it: against two other programs' logits, on one and several
devices, by layers, beside another sequence, with states saved and loaded.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from vkbackend.models.registry import Architecture, architectures
from vkbackend.tools.console import console, table, write_json

HELP = "List the architectures of models that run"
TESTS = "tests/models/test_architectures.py"
PROOFS = {  # by column: the tests, one of them per architecture
    "tensor parallel": ("test_oracles_on_numpy", "test_three_devices_equal_one", "test_devices_equal_one"),
    "layer split": ("test_layers_on_different_devices",),
    "state save": ("test_a_saved_slot_goes_on_elsewhere",),
    "control vectors": ("test_control_vectors",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print a JSON list: the columns of the table, and the tests"
    )


def row(a: Architecture) -> dict[str, str]:
    """Columns and cells of an architecture."""
    return {
        "architecture": a.name,
        "models": a.models,
        "tensor parallel": "yes",
        "layer split": "yes",
        "state save": "whole slots" if a.recurrent else "yes",
        "control vectors": "yes",
        "experts": "yes" if a.experts else "-",
        "sliding window": "yes" if a.windows else "-",
        "recurrent": "yes" if a.recurrent else "-",
        "tests": f"-k {a.name}",
    }


def run(args: argparse.Namespace) -> None:
    found = architectures()
    if args.json:
        tests = {column: [f"{TESTS}::{name}" for name in names] for column, names in PROOFS.items()}
        write_json(
            [asdict(a) | {"state_save": row(a)["state save"], "tests": tests} for a in found], indent=1
        )
        return
    rows = [row(a) for a in found]
    out = console()
    out.print(table("", list(rows[0]), [list(r.values()) for r in rows]), "")
    out.print(f"tests: {TESTS} --all, with -k as in the last column", markup=False)


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["models", *sys.argv[1:]]))
