"""Compares logits with llama.cpp's for random models of each architecture: `python -m
vkbackend.tools.studies.llama_archs --python PYTHON [NAME ...]`. llama.cpp writes a file with all keys and
random tensors, as in its test-llama-archs.

PYTHON is an interpreter with the package xllamacpp (extra `oracles`), whose llama.cpp runs on the CPU. A
process makes each file (tests/support/oracles/llama_archs.py), because llama.cpp may abort. The numpy device
computes vkbackend's logits.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vkbackend.errors import VkbackendError
from vkbackend.models.architectures.registry import ARCHITECTURES, model_class
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.options import Options
from vkbackend.step import Run
from vkbackend.tools.measure.turns import table

ORACLE = Path(__file__).resolve().parents[2] / "tests/support/oracles/llama_archs.py"
AGREES = 1e-9  # the largest NMSE
AGREES_GELU = 1e-5  # for models with GELU, which llama.cpp reads from a table of F16 values
GELU = {
    "bloom", "codeshell", "falcon", "gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "gpt2", "gptneox",
    "mpt", "phi2", "starcoder", "starcoder2",
}  # fmt: skip
# The largest NMSE of models that llama.cpp computes differently.
DIFFERS = {"baichuan": 1e-4, "grovemoe": 1e-2, "phimoe": 1e-2}
# llama.cpp cannot create a glm5-next model from these keys. minicpm3 has no dimensions without RoPE.
REFUSED = {"glm5-next": "llama.cpp", "minicpm3": "shared dimensions"}
EXPERTS = {"ernie4_5"}  # llama.cpp requires the keys for experts even in files without experts
TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Outcome:
    """A file's NMSE, or the reason why there is none."""

    name: str
    nmse: float | None
    reason: str = ""

    @property
    def agrees(self) -> bool:
        return self.nmse is not None and self.nmse <= (AGREES_GELU if self.name in GELU else AGREES)


def outcome_of(name: str, python: str, folder: Path) -> Outcome:
    path = folder / f"{name}.gguf"
    command = [python, "-W", "ignore", str(ORACLE), name, str(path)]
    command += ["--experts"] if model_class(name).mixture or name in EXPERTS else []
    places = [str(ORACLE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=TIMEOUT_S)
    if done.returncode:
        return Outcome(name, None, f"llama.cpp: {_reason(done.stderr) or f'exit {done.returncode}'}")
    known = np.load(path.with_suffix(".npz"))
    try:
        got = logits_of(path, known["tokens"].tolist())
    except VkbackendError as error:
        return Outcome(name, None, str(error).replace(f"{path}: ", ""))
    want = known["logits"].astype(np.float64)
    return Outcome(name, float(((got - want) ** 2).sum() / (want**2).sum()))


def _reason(stderr: str) -> str:
    words = "error loading", "GGML_ASSERT", "Error: "
    lines = [line for line in stderr.splitlines() if any(word in line for word in words)]
    return lines[0].rpartition("error loading model: ")[2] if lines else ""


def logits_of(path: Path, tokens: list[int]) -> np.ndarray:
    n = len(tokens)
    options = Options.of(path, devices=("numpy",), n_ctx=n, n_ubatch=n, type_k="f32", type_v="f32")
    runner = Runner(options)
    try:
        return runner.step(tokens, [Run(0, 0, n, 0)], range(n)).astype(np.float64)
    finally:
        runner.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="architectures (default: all that generate text)")
    add("--python", default=sys.executable, metavar="FILE", help="a Python that has xllamacpp")
    args = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.names or ARCHITECTURES:
            outcomes.append(outcome := outcome_of(name, args.python, Path(folder)))
            print(name, "-" if outcome.nmse is None else f"{outcome.nmse:.1e}", outcome.reason, flush=True)
            Path(folder, f"{name}.gguf").unlink(missing_ok=True)
    rows = [[o.name, f"{o.nmse:.1e}" if o.nmse is not None else o.reason] for o in outcomes if not o.agrees]
    n = len(outcomes) - len(rows)
    table(f"{n} of {len(outcomes)} agree; the others:", ("architecture", "NMSE, or why there is none"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
