"""Parts that compare every op with its twin, and layers of real models with the numpy device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import chain, zip_longest

import numpy as np

from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.options import Options
from vkbackend.step import Run
from vkbackend.tools.measure.synthetic import Synthetic
from vkbackend.tools.op_cases.cases import CASES
from vkbackend.tools.op_cases.check import check_case
from vkbackend.tools.op_cases.setup import Case
from vkbackend.tools.report.part import LeftOut, Part, Row

SEED = 0


def in_turns(cases: Sequence[Case]) -> list[Case]:
    """Order cases so that every op's first case precedes all second cases. An incomplete run then covers all
    ops."""
    kinds: dict[type, list[Case]] = defaultdict(list)
    for case in cases:
        kinds[type(case)].append(case)
    return [case for case in chain.from_iterable(zip_longest(*kinds.values())) if case is not None]


@cache
def named() -> dict[str, Case]:
    return {repr(case): case for case in in_turns(CASES)}


class Verify(Part):
    title = "Every op against its numpy twin"
    share, deadline_s = 0.3, 60.0

    def cases(self) -> list[str]:
        return list(named())

    def run(self, case: str) -> list[Row]:
        asked = named()[case]
        if lacks := set(asked.needs) - self.device.limits.features:
            raise LeftOut(f"the device lacks {', '.join(sorted(lacks))}")
        return [
            {
                "case": case,
                "shaders": list(checked.shaders),
                "nmse": checked.error,
                "allowed": asked.tolerance,
                "failure": checked.failure,
            }
            for checked in check_case(asked, self.device, SEED)
        ]

    @classmethod
    def wrong(cls, row: Row) -> str:
        return f"{row['case']}: {row['failure']}" if row["failure"] else ""

    @classmethod
    def columns(cls, rows: Sequence[Row]) -> tuple[Sequence[str], list[Sequence[object]]]:
        """Return a table that shows for each op the error that is nearest to its limit."""
        by_op: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in rows:
            for op in dict.fromkeys(name.partition(".")[0] for name in row["shaders"]):
                by_op[row["device"], op].append(row)
        lines: list[Sequence[object]] = []
        for (device, op), of_op in sorted(by_op.items()):
            worst = max(of_op, key=lambda row: row["nmse"] / (row["allowed"] or 1.0))
            failed = sum(bool(row["failure"]) for row in of_op)
            lines.append((device, op, len(of_op), failed, f"{worst['nmse']:.2g}", f"{worst['allowed']:.2g}"))
        return ("device", "op", "cases", "failed", "worst NMSE", "allowed"), lines


# llama-1b has heads of 64 and a tied output. qwen3-8b has head norms. qwen3-30b-a3b has 128 experts.
SHAPES = ("llama-1b", "qwen3-8b", "qwen3-30b-a3b")
TYPE, N_LAYER = "Q4_K", 1
N_VOCAB = 4096  # Numpy unpacks every matrix in each step, so 128k tokens would take ten seconds.
PROMPTS = (33, 4, 1)  # At each length the device uses different ops.
# "exact" ops differ from numpy only in the order of F32 sums. "fast" ops have activations of 8 or 16 bits,
# which cause errors of 5e-5 to 9e-5 per product, or more if nearly equal experts swap. Wrong results have
# errors of about 1.
ALLOWED = {"exact": 1e-6, "fast": 2e-2}


class Shapes(Part):
    """Compares logits with the logits of the numpy device, for prompts of several lengths and for the next
    token."""

    title = "Layers of real models against the numpy device"
    share, deadline_s = 0.08, 240.0

    def cases(self) -> list[str]:
        return [f"{shape}:{TYPE}" for shape in SHAPES]

    def run(self, case: str) -> list[Row]:
        want = logits(case, "numpy", exact=True)
        rows: list[Row] = []
        for how, allowed in ALLOWED.items():
            got = logits(case, self.devices[0], exact=how == "exact")
            error = [float(np.sum((a - b) ** 2) / np.sum(b * b)) for a, b in zip(got, want, strict=True)]
            worst = float(np.max(error))  # keeps NaN
            same = sum(int(a.argmax() == b.argmax()) for a, b in zip(got, want, strict=True))
            rows.append(
                {
                    "model": f"{case}, {N_LAYER} layer",
                    "ops": how,
                    "logits NMSE": worst,
                    "allowed": allowed,
                    "same best token": f"{same} of {len(want)}",
                    "right": worst <= allowed,
                }
            )
        return rows

    @classmethod
    def wrong(cls, row: Row) -> str:
        return "" if row["right"] else f"logits NMSE {row['logits NMSE']}, allowed {row['allowed']}"


def logits(spec: str, device: str, exact: bool) -> list[np.ndarray]:
    """Return the float64 logits of each prompt's last token and of the next token."""
    options = Options.of(spec, devices=[device], n_ctx=64, n_ubatch=64, exact=exact)
    runner = Runner(options, Synthetic(spec, N_LAYER, N_VOCAB))
    try:
        tokens = np.random.default_rng(SEED).integers(0, N_VOCAB, max(PROMPTS) + 1).tolist()
        rows = []
        for n in PROMPTS:
            for first, end in ((0, n), (n, n + 1)):
                run = Run(0, 0, end - first, first)
                rows.append(runner.step(tokens[first:end], [run], [end - first - 1])[0].astype(np.float64))
        return rows
    finally:
        runner.close()
