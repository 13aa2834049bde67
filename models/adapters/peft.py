"""Reads a PEFT adapter: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, deserialize

from vkbackend.errors import AdapterError, UnsupportedModel
from vkbackend.formats import widened
from vkbackend.models.adapters.adapter import Adapter, Pair, check_file, check_pair
from vkbackend.models.adapters.peft_config import PeftConfig, read_peft_config
from vkbackend.models.adapters.peft_names import PeftNames, Target, plain_name

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_TENSOR = re.compile(r"(?P<module>.+?)\.lora_(?P<half>[AB])(?:\.[^.]+)?\.weight")
_TYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
Half = tuple[np.ndarray, str]  # float32 values, and their type in the file


def is_peft_folder(path: str) -> bool:
    return Path(path).is_dir()


def read_peft_adapter(path: str, architecture: str, n_layer: int, n_expert: int, head_dim: int) -> Adapter:
    """Raises AdapterError for a damaged or unsuitable file, and UnsupportedModel for a variant of LoRA that
    is not implemented. `n_expert` and `head_dim` are values of the model."""
    folder = Path(path)
    config = read_peft_config(folder / CONFIG)
    if not (folder / WEIGHTS).exists() and (folder / PICKLE).exists():
        raise UnsupportedModel(
            f"{folder / PICKLE}: a pickle can run any code, and is not read; save the adapter as safetensors"
        )
    names = PeftNames(path, architecture, n_layer, head_dim)
    pairs: dict[str, Pair] = {}
    stacks: dict[str, dict[int, Pair]] = {}
    for module, halves in _modules(folder / WEIGHTS).items():
        target = names.target(module)
        pair = _pair(path, module, halves, config, names, target)
        if target.expert is not None:
            if not target.expert < n_expert:
                raise AdapterError(f"{path}: {module}: the model has {n_expert} experts")
            stacks.setdefault(target.tensor, {})[target.expert] = pair
        elif target.tensor in pairs:
            raise AdapterError(f"{path}: two modules are the tensor {target.tensor}: the second is {module}")
        else:
            pairs[target.tensor] = pair
    pairs |= {tensor: _stacked(path, tensor, experts, n_expert) for tensor, experts in stacks.items()}
    return Adapter(path, pairs, invocation=config.invocation)


def _modules(path: Path) -> dict[str, dict[str, Half]]:
    check_file(path)
    try:
        tensors = deserialize(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path}: not a whole safetensors file: {error}; get the file again") from None
    modules: dict[str, dict[str, Half]] = {}
    for name, tensor in tensors:
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise UnsupportedModel(
                f"{path}: the tensor {name!r} is not the lora_A or lora_B of a linear module, and would be "
                "ignored"
            )
        kind = _TYPES.get(tensor["dtype"])
        if kind is None:
            raise UnsupportedModel(f"{path}: {name} is {tensor['dtype']}, expected {', '.join(_TYPES)}")
        raw = np.frombuffer(tensor["data"], np.uint8)
        values = widened(raw, kind).view(np.float32).reshape(tensor["shape"])
        halves = modules.setdefault(match["module"], {})
        if match["half"] in halves:
            raise UnsupportedModel(
                f"{path}: {match['module']} has several adapters; save each in its own folder"
            )
        halves[match["half"]] = values, kind
    if not modules:
        raise AdapterError(f"{path}: the file has no tensors")
    return modules


def _pair(
    path: str, module: str, halves: Mapping[str, Half], config: PeftConfig, names: PeftNames, target: Target
) -> Pair:
    if missing := {"A", "B"} - halves.keys():
        raise AdapterError(f"{path}: {module} lacks lora_{missing.pop()}; the file is incomplete")
    (a, a_type), (b, b_type) = halves["A"], halves["B"]
    dtype = a_type if a_type == b_type else "f32"
    check_pair(path, module, Pair(a, b, dtype))
    pair = Pair(a, names.rows(target.tensor, b), dtype, config.factor(plain_name(module), int(a.shape[0])))
    check_pair(path, module, pair)
    return pair


def _stacked(path: str, tensor: str, experts: Mapping[int, Pair], n_expert: int) -> Pair:
    """Return the experts' pairs as one, with zeros for experts without a pair."""
    some = next(iter(experts.values()))
    for expert, pair in experts.items():
        if (pair.a.shape, pair.b.shape, pair.factor) != (some.a.shape, some.b.shape, some.factor):
            raise UnsupportedModel(
                f"{path}: {tensor}: expert {expert} has another rank or alpha than other experts, which is "
                "not supported"
            )
    a = np.zeros((n_expert, *some.a.shape), np.float32)
    b = np.zeros((n_expert, *some.b.shape), np.float32)
    for expert, pair in experts.items():
        a[expert], b[expert] = pair.a, pair.b
    same = {pair.dtype for pair in experts.values()} == {some.dtype}
    return Pair(a, b, some.dtype if same else "f32", some.factor)
