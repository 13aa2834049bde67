"""The requests of serving_soak, each with the text that the model alone generates for it."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.llm import LLM
from vkbackend.tools.studies.soak_images import (
    chat_body,
    completion,
    content_of,
    files_of_images,
    parts_of,
    prompt_of,
)

N_TOKENS = 24
# If the log probabilities of the two likeliest tokens differ by less, rounding may choose the other token in
# another batch. Requests with such a choice are left out.
TIE = 1e-3
WHO = "a cat", "an owl", "two mice", "a small boat", "Tom", "a girl named Lily", "the old king", "a red bird"
WORDS = "they went to the park and saw a big tree near the river where little dogs play all day".split()
RANK, ADAPTERS = 4, ("a", "b")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer"}},
    "required": ["a"],
}
STRUCTURES: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {"grammar": 'root ::= [a-z ]+ "." [a-z ]*'}, {"json_schema": SCHEMA},
)  # fmt: skip
USED: tuple[dict[str, float], ...] = ({}, {}, {"a": 1.0}, {"b": 0.5}, {"a": 0.5, "b": -0.5})


CHATS = "/chat/completions", "/responses", "/messages"


@dataclass(frozen=True)
class Known:
    path: str
    body: dict[str, Any]
    text: str


def write_adapters(model: str, folder: Path) -> dict[str, Path]:
    """Write random PEFT adapters of the value and down projections of a llama model."""
    paths = {}
    with GGUF.open(model) as gguf:
        names = {"attn_v": "self_attn.v_proj", "ffn_down": "mlp.down_proj"}
        shapes = {
            f"model.layers.{name.split('.')[1]}.{names[name.split('.')[2]]}": info.shape
            for name, info in gguf.tensors.items()
            if name.startswith("blk.") and name.split(".")[2] in names
        }
    for seed, name in enumerate(ADAPTERS):
        rng, tensors = np.random.default_rng(seed), {}
        for module, (n_out, n_in) in shapes.items():
            tensors[f"base_model.model.{module}.lora_A.weight"] = rng.normal(size=(RANK, n_in)) / n_in**0.5
            tensors[f"base_model.model.{module}.lora_B.weight"] = rng.normal(size=(n_out, RANK)) * 0.2
        paths[name] = folder / name
        os.mkdir(paths[name])
        save_file(
            {k: v.astype(np.float32) for k, v in tensors.items()}, paths[name] / "adapter_model.safetensors"
        )
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
        (paths[name] / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return paths


def prompts(rng: random.Random, n: int) -> list[str]:
    """Return texts of 10 to 150 words that share beginnings."""
    begins = [f"Once upon a time there was {who}. {' '.join(rng.choices(WORDS, k=60))}" for who in WHO]
    return [f"{rng.choice(begins)} {' '.join(rng.choices(WORDS, k=rng.randrange(1, 80)))}." for _ in range(n)]


def known_requests(
    model: str, projector: str | None, devices: Sequence[str], adapters: dict[str, Path], seed: int, n: int
) -> list[Known]:
    """Return about `n` greedy requests. The model generates each text alone, without drafts and without a
    cached prefix. With a projector, two thirds of them have images."""
    rng, known = random.Random(seed), []
    lora = {name: str(path) for name, path in adapters.items()}
    how: dict[str, Any] = {"lora": lora, "lora_init_without_apply": True} if lora else {}
    files = files_of_images()
    with LLM(model, mmproj=projector, devices=list(devices), n_ctx=512, exact=True, prefix_cache=False,
             **how) as llm:  # fmt: skip
        for i, prompt in enumerate(prompts(rng, n)):
            structure, used = rng.choice(STRUCTURES), rng.choice(USED) if adapters else {}
            # Without a structure, half of the texts ignore end tokens, which makes these texts longer.
            structure = structure or ({"ignore_eos": True} if rng.random() < 0.5 else {})
            options = {"temperature": 0} | structure
            scores: dict[str, Any] = {"logprobs": 2, "lora": list(used.items()) if lora else None}
            scales = [{"id": list(lora).index(name), "scale": scale} for name, scale in used.items()]
            parts = parts_of(rng, files)
            if not projector or i % 3 == 0:
                path, body = "/completions", {"prompt": prompt, "max_tokens": N_TOKENS}
                answer = llm.generate(prompt, N_TOKENS, **scores, **options)
            elif i % 3 == 1:
                path, body = completion(parts)
                body["max_tokens"] = N_TOKENS
                answer = llm.generate(prompt_of(parts), N_TOKENS, **scores, **options)
            else:
                path = rng.choice(CHATS)
                if path == "/messages":  # This API has no fields for structures, as in llama-server.
                    options = {"temperature": 0}
                body = chat_body(path, parts, N_TOKENS)
                messages = [{"role": "user", "content": content_of(parts)}]
                answer = llm.chat(messages, N_TOKENS, **scores, **options).completion
            if all(row.top[0][1] - row.top[1][1] >= TIE for row in answer.logprobs or []):
                known.append(Known(path, body | options | ({"lora": scales} if lora else {}), answer.text))
    return known


def text_of(path: str, answer: dict[str, Any]) -> str:
    if path == "/responses":
        return "".join(part["text"] for item in answer["output"] for part in item.get("content", []))
    if path == "/messages":
        return "".join(block["text"] for block in answer["content"])
    choice = answer["choices"][0]
    return str(choice["text"] if path == "/completions" else choice["message"]["content"])


def piece_of(event: dict[str, Any]) -> str:
    if choices := event.get("choices"):
        return choices[0].get("text") or choices[0].get("delta", {}).get("content") or ""
    if event.get("type") == "content_block_delta":
        return event["delta"].get("text", "")
    return event["delta"] if event.get("type") == "response.output_text.delta" else ""
