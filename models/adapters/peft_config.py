"""The `adapter_config.json` of a PEFT adapter."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vkbackend.errors import AdapterError, UnsupportedModel
from vkbackend.models.adapters.adapter import check_file

MAX_NBYTES = 1 << 20
MAX_PATTERN = 256  # characters
# Fields that change the result and are not implemented. They must be empty or false.
CHANGING = (
    "use_dora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save", "trainable_token_indices",
    "layer_replication", "arrow_config", "kasa_config", "monteclora_config", "velora_config",
    "target_parameters",
)  # fmt: skip
_WORD = re.compile(r"\\\.|\\d\+|\.\*|\.\+|[\w.\-]")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """`alphas` maps patterns of module names to their alpha. Other modules have `alpha`."""

    alpha: float
    alphas: Mapping[re.Pattern[str], float]
    rslora: bool
    invocation: tuple[int, ...]

    def factor(self, module: str, rank: int) -> float:
        """Return alpha / rank, or alpha / sqrt(rank) for rank-stabilized LoRA (Kalajdzievski 2023,
        arXiv:2312.03732)."""
        matches = (alpha for pattern, alpha in self.alphas.items() if pattern.fullmatch(module))
        return next(matches, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


def read_peft_config(path: Path) -> PeftConfig:
    """Raises AdapterError for a damaged file, and UnsupportedModel for a variant of LoRA that is not
    implemented."""
    check_file(path)
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_NBYTES + 1)
        if len(raw) > MAX_NBYTES:
            raise AdapterError(f"{path}: has more than {MAX_NBYTES} bytes; the file is damaged")
        config = json.loads(raw)
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{path}: not a PEFT configuration: {error}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{path}: expected a JSON object")
    if (kind := config.get("peft_type")) != "LORA":
        raise UnsupportedModel(f"{path}: peft_type is {kind!r}; only LORA is supported")
    changing = [name for name in CHANGING if config.get(name)]
    if config.get("bias", "none") != "none":
        changing.append("bias")
    if changing:
        values = ", ".join(f"{name}={str(config[name])[:80]}" for name in changing)
        raise UnsupportedModel(
            f"{path}: {values} is not supported; train the adapter without it, or merge it"
        )
    rules = config.get("alpha_pattern") or {}
    if not isinstance(rules, dict):
        raise AdapterError(f"{path}: alpha_pattern is {rules!r:.80}, expected an object")
    alphas = {_pattern(path, text): _number(path, f"alpha_pattern of {text}", rules[text]) for text in rules}
    tokens = config.get("alora_invocation_tokens") or []
    if not isinstance(tokens, list) or not all(
        type(token) is int and 0 <= token < 1 << 31 for token in tokens
    ):
        raise AdapterError(f"{path}: alora_invocation_tokens is {tokens!r:.80}, expected token ids")
    alpha = _number(path, "lora_alpha", config.get("lora_alpha"))
    return PeftConfig(alpha, alphas, bool(config.get("use_rslora")), tuple(tokens))


def _number(path: Path, name: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e30:
        return float(value)
    raise AdapterError(f"{path}: {name} is {value!r:.80}, expected a number")


def _pattern(path: Path, text: str) -> re.Pattern[str]:
    """Compile a pattern as PEFT does: it matches the end of a module's name. Only names, dots, `.*`, `.+` and
    `\\d+` are allowed, because matching an arbitrary expression can take forever."""
    inner = text.removeprefix("^").removesuffix("$")
    wild = inner.count("*") + inner.count("+")
    if not inner or len(text) > MAX_PATTERN or wild > 4 or _WORD.sub("", inner):
        raise UnsupportedModel(
            f"{path}: alpha_pattern {text!r:.80}: only module names with up to 4 of .*, .+ and \\d+ are "
            "supported"
        )
    return re.compile(inner if text.startswith("^") else rf"(?:.*\.)?(?:{inner})")
