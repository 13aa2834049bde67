"""Builds the fixtures of encoders.py as models of `transformers`. The activation is the tanh form of GELU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from oracles.encoders import N_HEAD
from oracles.fixture import N_VOCAB, PROMPT, Fixture
from oracles.parts import HEAD_DIM, N_EMBD, N_FF

State = dict[str, np.ndarray]
GELU = "gelu_pytorch_tanh"
MODELS: dict[str, Callable[[Fixture], tuple[Any, State]]] = {}


def model_of(name: str) -> Callable[[Callable[[Fixture], tuple[Any, State]]], Any]:
    def register(make: Callable[[Fixture], tuple[Any, State]]) -> Any:
        MODELS[name] = make
        return make

    return register


def sizes(m: Fixture) -> dict[str, Any]:
    k = m.keys
    return {
        "vocab_size": N_VOCAB,
        "hidden_size": N_EMBD,
        "num_hidden_layers": k["block_count"],
        "num_attention_heads": N_HEAD,
        "intermediate_size": N_FF,
        "pad_token_id": None,
        "attn_implementation": "eager",
    }


def renamed(m: Fixture, outer: dict[str, str], inner: dict[str, str], layers: str) -> State:
    state = {}
    for name, values in m.tensors.items():
        *where, kind = name.split(".")
        if where[0] == "blk":
            stem = inner[".".join(where[2:])]
            state[f"{layers}.{where[1]}.{stem}.{kind}"] = values
        elif (stem := outer.get(".".join(where), "")) != "":
            state[f"{stem}.{kind}"] = values
    return state


BERT_LAYER = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
BERT_OUTER = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}


@model_of("bert")
def bert(m: Fixture) -> tuple[Any, State]:
    config = transformers.BertConfig(
        **sizes(m) | {"pad_token_id": 0},
        hidden_act=GELU,
        max_position_embeddings=m.keys["context_length"],
        type_vocab_size=2,
        layer_norm_eps=m.keys["attention.layer_norm_epsilon"],
    )
    return transformers.BertModel(config, add_pooling_layer=False), renamed(
        m, BERT_OUTER, BERT_LAYER, "encoder.layer"
    )


@model_of("bert+roberta")
def roberta(m: Fixture) -> tuple[Any, State]:
    """The rows of the first two positions in `transformers` are missing in a GGUF file."""
    config = transformers.XLMRobertaConfig(
        **sizes(m) | {"pad_token_id": 1},
        hidden_act=GELU,
        max_position_embeddings=m.keys["context_length"] + 2,
        type_vocab_size=1,
        num_labels=1,
        layer_norm_eps=m.keys["attention.layer_norm_epsilon"],
    )
    outer = {name: f"roberta.{stem}" for name, stem in BERT_OUTER.items()}
    heads = {"cls": "classifier.dense", "cls.output": "classifier.out_proj"}
    state = renamed(m, outer | heads, BERT_LAYER, "roberta.encoder.layer")
    rows = state["roberta.embeddings.position_embeddings.weight"]
    state["roberta.embeddings.position_embeddings.weight"] = np.concatenate([np.zeros_like(rows[:2]), rows])
    return transformers.XLMRobertaForSequenceClassification(config), state


NEW_OUTER = {name: stem for name, stem in BERT_OUTER.items() if name != "position_embd"}
NEW_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_output_norm": "post_attention_layernorm",
    "layer_output_norm": "post_mlp_layernorm",
}
GLU = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def theta(base: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base}


@model_of("nomic-bert")
def nomic_bert(m: Fixture) -> tuple[Any, State]:
    config = transformers.NomicBertConfig(
        **sizes(m) | {"pad_token_id": 0},
        head_dim=HEAD_DIM,
        max_position_embeddings=m.keys["context_length"],
        layer_norm_eps=m.keys["attention.layer_norm_epsilon"],
        rope_parameters=theta(m.keys["rope.freq_base"]),
    )
    model = transformers.NomicBertModel(config, add_pooling_layer=False)
    return model, renamed(m, NEW_OUTER, NEW_LAYER | GLU, "layers")


@model_of("jina-bert-v3")
def jina_bert_v3(m: Fixture) -> tuple[Any, State]:
    config = transformers.JinaEmbeddingsV3Config(
        **sizes(m) | {"pad_token_id": 1},
        hidden_act=GELU,
        max_position_embeddings=m.keys["context_length"],
        type_vocab_size=1,
        layer_norm_eps=m.keys["attention.layer_norm_epsilon"],
        rope_parameters=theta(m.keys["rope.freq_base"]),
    )
    layer = NEW_LAYER | {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
    model = transformers.JinaEmbeddingsV3Model(config, add_pooling_layer=False)
    return model, renamed(m, NEW_OUTER, layer, "layers")


@model_of("modern-bert")
def modern_bert(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    ends = {f"{name}_token_id": 0 for name in ("bos", "eos", "cls", "sep", "pad")}
    config = transformers.ModernBertConfig(
        **sizes(m) | ends,
        hidden_activation=GELU,
        max_position_embeddings=k["context_length"],
        norm_eps=k["attention.layer_norm_epsilon"],
        local_attention=k["attention.sliding_window"],
        layer_types=["sliding_attention" if il % 3 else "full_attention" for il in range(k["block_count"])],
        rope_parameters={
            "full_attention": theta(k["rope.freq_base"]),
            "sliding_attention": theta(k["rope.freq_base_swa"]),
        },
        classifier_pooling="mean",
        classifier_activation="gelu",
        num_labels=1,
    )
    outer = {
        "token_embd": "model.embeddings.tok_embeddings",
        "token_embd_norm": "model.embeddings.norm",
        "output_norm": "model.final_norm",
        "cls": "head.dense",
        "cls.norm": "head.norm",
        "cls.output": "classifier",
    }
    layer = {
        "attn_norm": "attn_norm",
        "ffn_norm": "mlp_norm",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.Wo",
    }
    layer |= {"ffn_up": "mlp.Wi", "ffn_down": "mlp.Wo"}
    return transformers.ModernBertForSequenceClassification(config), renamed(m, outer, layer, "model.layers")


LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{name: NEW_LAYER[name] for name in ("attn_q", "attn_k", "attn_v", "attn_output")},
    **GLU,
}


@model_of("eurobert")
def eurobert(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    config = transformers.EuroBertConfig(
        **sizes(m),
        num_key_value_heads=k["attention.head_count_kv"],
        max_position_embeddings=k["context_length"],
        rms_norm_eps=k["attention.layer_norm_rms_epsilon"],
        rope_parameters=theta(k["rope.freq_base"]),
    )
    outer = {"token_embd": "embed_tokens", "output_norm": "norm"}
    return transformers.EuroBertModel(config), renamed(m, outer, LLAMA_LAYER, "layers")


@model_of("gemma-embedding")
def gemma_embedding(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    config = transformers.Gemma3TextConfig(
        **sizes(m) | {"pad_token_id": 0},
        num_key_value_heads=k["attention.head_count_kv"],
        head_dim=HEAD_DIM,
        query_pre_attn_scalar=HEAD_DIM,
        hidden_activation=GELU,
        max_position_embeddings=k["context_length"],
        rms_norm_eps=k["attention.layer_norm_rms_epsilon"],
        sliding_window=k["attention.sliding_window"],
        layer_types=[
            "sliding_attention" if x else "full_attention" for x in k["attention.sliding_window_pattern"]
        ],
        rope_parameters={
            "full_attention": theta(k["rope.freq_base"]),
            "sliding_attention": theta(k["rope.freq_base_swa"]),
        },
        use_bidirectional_attention=True,
    )
    layer = LLAMA_LAYER | {
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
    }
    state = renamed(m, {"token_embd": "embed_tokens", "output_norm": "norm"}, layer, "layers")
    # `transformers` adds 1 to the weights of norms.
    state = {name: values - 1 if "norm" in name else values for name, values in state.items()}
    return transformers.Gemma3TextModel(config), state


@torch.no_grad()
def hidden(m: Fixture, types: list[int] | None = None) -> dict[str, np.ndarray]:
    """Return the hidden states [n_tokens, n_embd] of the prompt, and the logits of a classification head."""
    network, state = MODELS[m.name](m)
    network = network.float().eval()
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in state.items()}
    missing = network.load_state_dict(tensors, strict=False)
    assert not missing.unexpected_keys, missing
    assert all(
        "pooler" in name or "rotary" in name or "position_ids" in name for name in missing.missing_keys
    ), missing
    kinds = {} if types is None else {"token_type_ids": torch.tensor([types])}
    out = network(torch.tensor([PROMPT]), output_hidden_states=True, **kinds)
    outputs = {"hidden": (out.hidden_states[-1] if "logits" in out else out.last_hidden_state)[0].numpy()}
    if "logits" in out:
        outputs["logits"] = out.logits[0].numpy()
    return outputs
