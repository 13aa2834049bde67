"""Makes `golden/adapters.npz`, the logits of tiny random models with low-rank adapters.

    PYTHONPATH=tests/support python tests/support/oracles/make_adapters.py  # Writes the file.

Needs torch, transformers, peft and xllamacpp. PEFT computes the logits of its adapters, and llama.cpp the
logits of GGUF adapters.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from adapters import ALPHA as ALPHA_OF_FILES
from adapters import DENSE, EXPERTS, random_pairs, write_adapter
from oracles import hf, llama_cpp
from oracles.fixture import N_VOCAB, write
from oracles.fixtures import build
from oracles.peft_cases import ALPHA, CASES, PROMPT, RANK, PeftCase, values
from places import GOLDEN

# (fixture, tensors): llama.cpp applies two adapters of ranks 4 and 6 with the scales 1 and -0.25.
OF_LLAMA_CPP = {
    "llama": f"{DENSE}|output\\.weight",
    "qwen3": DENSE,
    "phi3": DENSE,
    "cohere2": DENSE,
    "llama+experts": f"{DENSE}|{EXPERTS}",
    "qwen3moe": f"{DENSE}|{EXPERTS}",
    "gpt-oss": EXPERTS,
}
SCALES = (1.0, -0.25)


def of_peft(case: PeftCase) -> tuple[np.ndarray, dict[str, Any]]:
    import peft
    import torch

    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=list(case.modules), task_type="CAUSAL_LM",
        lora_dropout=0.0, **case.config,
    )  # fmt: skip
    network = peft.get_peft_model(hf.model(build(case.fixture)), config).eval()
    shapes: dict[str, Any] = {}
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if ".lora_" in name:
                stored = name.replace(".default.", ".")
                shapes[stored] = list(parameter.shape)
                parameter.copy_(torch.from_numpy(values(stored, tuple(parameter.shape))))
        logits = network(input_ids=torch.tensor([PROMPT])).logits[0]
    return logits.float().numpy(), shapes


def of_llama_cpp(name: str, pattern: str, alpha: float | None = ALPHA_OF_FILES) -> np.ndarray:
    fixture = build(name)
    with tempfile.TemporaryDirectory() as folder:
        path = write(fixture, Path(folder) / "model.gguf")
        files = [
            write_adapter(
                Path(folder) / f"{rank}.gguf", fixture.arch, random_pairs(fixture, rank, pattern), alpha
            )
            for rank in (4, 6)
        ]
        adapters = list(zip(files, SCALES, strict=True))
        return llama_cpp.logits(path, [PROMPT], N_VOCAB, adapters=adapters)


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    about: dict[str, Any] = {
        "made by": f"peft {version('peft')}, {hf.versions()}; {llama_cpp.versions()}",
        "shapes": {},
    }
    for name, case in CASES.items():
        arrays[f"peft {name}"], about["shapes"][name] = of_peft(case)
        print(name, len(about["shapes"][name]), flush=True)
    for name, pattern in OF_LLAMA_CPP.items():
        arrays[f"llama.cpp {name}"] = of_llama_cpp(name, pattern)
        print("llama.cpp", name, flush=True)
    arrays["llama.cpp without alpha"] = of_llama_cpp("llama", OF_LLAMA_CPP["llama"], None)
    np.savez_compressed(GOLDEN / "adapters.npz", about=json.dumps(about), **arrays)


if __name__ == "__main__":
    sys.exit(main())
