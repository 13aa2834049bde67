"""Makes `heads/*.npz`, the logits of the heads in heads.py, with the layers of `transformers`.

    PYTHONPATH=tests/support python tests/support/oracles/make_heads.py [NAME ...]  # Writes the files.

Needs torch and transformers. `transformers` computes the model's states and the head's block; numpy computes
the block's input in float64. The heads of DeepSeek V3 and GLM-4.5 must agree with the `MtpModel` of
`transformers`, which supports no other heads.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from oracles import hf
from oracles.fixture import PROMPT, Fixture
from oracles.heads import HEADS, SOURCES, only_head, with_head, without_head
from places import DATA

FOLDER = DATA / "heads"
N_ROWS, N_DRAFTED = 16, 4
Rows = np.ndarray  # float64 [n, n_embd]


class Head:
    def __init__(self, fixture: Fixture) -> None:
        self.m, self.p = fixture, f"blk.{fixture.n_layer}."
        rms = fixture.keys.get("attention.layer_norm_rms_epsilon")
        self.centered, self.eps = rms is None, rms or fixture.keys["attention.layer_norm_epsilon"]
        self.network = hf.model(only_head(fixture))
        self.before_norm: list[torch.Tensor] = []
        if fixture.arch == "nemotron_h_moe":  # this head's last norm is a layer norm
            norm = self.network.base_model.norm_f
            norm.register_forward_pre_hook(lambda _, inputs: self.before_norm.append(inputs[0]))

    def norm(self, x: Rows, name: str) -> Rows:
        w = self.m[f"{self.p}nextn.{name}.weight"].astype(np.float64)
        if self.centered:
            x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.eps) * w

    def entries(self, tokens: list[int], h: Rows) -> Rows:
        name = f"{self.p}nextn.embed_tokens.weight"
        e = self.m.tensors.get(name, self.m["token_embd.weight"])[tokens].astype(np.float64)
        both = np.concatenate([self.norm(e, "enorm"), self.norm(h, "hnorm")], -1)
        return both @ self.m[f"{self.p}nextn.eh_proj.weight"].T.astype(np.float64)

    @torch.no_grad()
    def outputs(self, x: Rows) -> tuple[Rows, np.ndarray]:
        self.before_norm.clear()
        given = torch.from_numpy(x.astype(np.float32))[None]
        result: Any = self.network(inputs_embeds=given, output_hidden_states=True, use_cache=False)
        if self.before_norm:
            h = self.before_norm[0][0].numpy().astype(np.float64)
            h = h - h.mean(-1, keepdims=True)
            g = h / np.sqrt(np.mean(h * h, -1, keepdims=True) + self.eps)
            g *= self.m[f"{self.p}nextn.shared_head_norm.weight"]
            return g, g @ self.m["output.weight"].T
        g = self.network.base_model(inputs_embeds=given, use_cache=False).last_hidden_state[0].numpy()
        return g.astype(np.float64), result.logits[0].numpy()


@torch.no_grad()
def states(network: Any, tokens: list[int]) -> tuple[Rows, np.ndarray]:
    given = torch.tensor([tokens])
    h = network.base_model(given, use_cache=False).last_hidden_state[0].numpy()
    return h.astype(np.float64), network(given, use_cache=False).logits[0].numpy()


def golden(name: str) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return the logits of the last prompt rows, and the logits and tokens of the drafted rows. The model
    chose the first token."""
    fixture = with_head(name)
    head, network = Head(fixture), hf.model(without_head(fixture))
    h, logits_of_model = states(network, PROMPT)
    x = head.entries(PROMPT, np.concatenate([np.zeros_like(h[:1]), h[:-1]]))
    logits = head.outputs(x)[1]
    tokens, before, drafted = [int(logits_of_model[-1].argmax())], h[-1:], []
    for _ in range(N_DRAFTED):
        x = np.concatenate([x, head.entries(tokens[-1:], before)])
        g, rows = head.outputs(x)
        before = g[-1:]
        drafted.append(rows[-1])
        tokens.append(int(rows[-1].argmax()))
    if name in ("deepseek2", "glm4moe"):
        check_mtp_model(head, network, h)
    return logits[-N_ROWS:], np.array(drafted), tokens[:-1]


@torch.no_grad()
def check_mtp_model(head: Head, network: Any, h: Rows) -> None:
    """Compare the head with MtpModel, which has no row at position 0."""
    from transformers.modeling_layers import MtpModel

    network.config.num_mtp_layers = 1
    theirs = MtpModel(network, 1).eval()
    layer, alone = theirs.layers[0], head.network.base_model
    [source] = set(SOURCES[head.m.name])
    layer.mtp_block.load_state_dict(alone.layers[source].state_dict())
    layer.post_norm.load_state_dict(alone.norm.state_dict())
    for part in ("enorm", "hnorm", "eh_proj"):
        weight = torch.from_numpy(head.m[f"{head.p}nextn.{part}.weight"])
        getattr(layer, part).weight.data = weight
    from transformers.cache_utils import DynamicCache

    tokens = torch.tensor([PROMPT[1:]])
    g = theirs.forward_layer(
        0,
        torch.from_numpy(h[None, :-1].astype(np.float32)),
        torch.arange(1, len(PROMPT))[None],
        DynamicCache(),
        input_ids=tokens,
    )[0].numpy()
    # RoPE depends on differences of positions only.
    ours = head.outputs(head.entries(PROMPT[1:], h[:-1]))[0]
    error = float(((g - ours) ** 2).sum() / (ours**2).sum())
    print(f"{head.m.name}: MtpModel differs by NMSE {error:.1e}", flush=True)
    assert error < 1e-10


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or HEADS:
        logits, drafted, tokens = golden(name)
        about = json.dumps({"made by": hf.versions()})
        logits, drafted = logits.astype(np.float32), drafted.astype(np.float32)
        np.savez_compressed(
            FOLDER / f"{name}.npz", logits=logits, drafted=drafted, tokens=tokens, about=about
        )
        print(f"{name:16} {tokens}", flush=True)


if __name__ == "__main__":
    main()
