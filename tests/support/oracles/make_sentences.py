"""Makes `golden/sentences.npz`, Sentence Transformers' embeddings and scores of texts.

    PYTHONPATH=tests/support python tests/support/oracles/make_sentences.py

Needs torch, transformers and sentence-transformers. The models are fixtures of encoders.py with a vocabulary
of words.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from oracles import hf, hf_encoders
from oracles.encoders import build
from oracles.fixture import Fixture
from places import GOLDEN
from rerankers import DOCUMENTS, QUERY, SPACE, add_head, add_words
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.models import Dense, Normalize, Pooling, Transformer

NAMES = "bert", "gemma-embedding"


def tokenizer(m: Fixture) -> Any:
    words = {token.removeprefix(SPACE): i for i, token in enumerate(m.keys["tokenizer.ggml.tokens"])}
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return transformers.BertTokenizer(vocab=words, do_lower_case=True, **special)


def loaded(network: Any, state: dict[str, np.ndarray]) -> Any:
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in state.items()}
    report = network.load_state_dict(tensors, strict=False)
    assert not report.unexpected_keys and not any("weight" in name for name in report.missing_keys), report
    return network.float().eval()


def dense(m: Fixture) -> Iterator[Any]:
    for name in ("dense_2.weight", "dense_3.weight"):
        if name in m.tensors:
            n_out, n_in = m[name].shape
            layer = Dense(n_in, n_out, bias=False, activation_function=torch.nn.Identity())
            loaded(layer, {"linear.weight": m[name]})
            yield layer


def embeddings(name: str, pooling: str, folder: Path) -> np.ndarray:
    m = build(name)
    add_words(m)
    network, state = hf_encoders.MODELS[name](m)
    loaded(network, state).save_pretrained(folder)
    tokenizer(m).save_pretrained(folder)
    body = Transformer(str(folder))
    body.auto_model.config._attn_implementation = "eager"
    modules = [body, Pooling(m.keys["embedding_length"], pooling), *dense(m), Normalize()]
    result: np.ndarray = SentenceTransformer(modules=modules, device="cpu").encode([QUERY, *DOCUMENTS])
    return result


def scores(folder: Path) -> np.ndarray:
    """Return the score of each document in 0..1, by a BERT with a classification head."""
    m = build("bert")
    add_words(m)
    add_head(m)
    base, state = hf_encoders.MODELS["bert"](m)
    base.config.num_labels, base.config.pooler_config = 1, None
    network = transformers.BertForSequenceClassification(base.config)
    heads = {"cls": "bert.pooler.dense", "cls.output": "classifier"}
    parts = {f"bert.{key}": values for key, values in state.items()}
    parts |= {f"{to}.{kind}": m[f"{at}.{kind}"] for at, to in heads.items() for kind in ("weight", "bias")}
    loaded(network, parts).save_pretrained(folder)
    tokenizer(m).save_pretrained(folder)
    model = CrossEncoder(str(folder), num_labels=1, device="cpu")
    result: np.ndarray = model.predict([(QUERY, document) for document in DOCUMENTS])
    return result


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            for pooling in ("mean", "cls"):
                arrays[f"{name} {pooling}"] = embeddings(name, pooling, Path(folder) / f"{name}-{pooling}")
        arrays["bert scores"] = scores(Path(folder) / "scores")
    about = {"made by": f"sentence-transformers {version('sentence-transformers')}, {hf.versions()}"}
    np.savez_compressed(GOLDEN / "sentences.npz", about=json.dumps(about), **arrays)
    for name, values in arrays.items():
        print(name, values.shape, values.reshape(-1)[:3])


if __name__ == "__main__":
    main()
