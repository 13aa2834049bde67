"""Finds the model file of a `general.architecture`."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import Any

from vkbackend.errors import GGUFError, InvalidArgument, UnsupportedModel
from vkbackend.models.architectures import eagle3
from vkbackend.models.architectures.base import Model
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.with_head import WithHead
from vkbackend.models.drafting.vocabulary import check_vocabulary
from vkbackend.models.gguf.reader import GGUF

# general.architecture -> its models
MODELS = {
    "llama": "Llama 1 to 3, Mistral, Mixtral, SmolLM",
    "llama4": "Llama 4 Scout, Maverick, their text part",
    "deci": "Llama-Nemotron Super 49B, Ultra 253B, 51B",
    "arcee": "AFM-4.5B",
    "xverse": "XVERSE 7B, 13B, 65B",
    "mistral3": "Ministral 3",
    "internlm2": "InternLM 2 and 2.5",
    "qwen": "Qwen 1",
    "qwen2": "Qwen2, Qwen2.5",
    "pangu-embedded": "openPangu-Embedded 1B, 7B",
    "qwen2vl": "Qwen2-VL, Qwen2.5-VL, their text part",
    "qwen2moe": "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    "qwen3": "dense Qwen3",
    "openelm": "OpenELM",
    "qwen3moe": "Qwen3-30B-A3B, Qwen3-235B-A22B",
    "grovemoe": "GroveMoE",
    "mellum": "Mellum 2",
    "qwen3vl": "Qwen3-VL, its text part",
    "qwen3vlmoe": "Qwen3-VL-30B-A3B, 235B-A22B, their text part",
    "qwen3next": "Qwen3-Next-80B-A3B",
    "qwen35": "dense Qwen3.5, Qwen3.6, Qwen3.8, such as Qwen3.8-27B",
    "qwen35moe": "Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B, Qwen3.6-35B-A3B",
    "qwen4exp": "Qwen3.8-Flash-Next, its text part",
    "deepseek": "DeepSeekMoE 16B",
    "bailingmoe": "Ling-lite, Ling-plus",
    "deepseek2": "DeepSeek V2, V3, R1, Kimi K2, GLM-4.7-Flash",
    "deepseek32": "DeepSeek V3.2",
    "glm-dsa": "GLM-5, GLM-5.2",
    "mistral4": "Mistral Small 4",
    "kimi-linear": "Kimi-Linear-48B-A3B",
    "kimi-k3": "Kimi K3, its text part",
    "deepseek4": "DeepSeek V4 Flash, Flash Vision (text), Pro",
    "glm5-next": "GLM-5.3-Flash, its text part",
    "bailingmoe3": "Ling 3",
    "mamba": "Mamba-1, Falcon Mamba",
    "mamba2": "Mamba-2, Mamba-Codestral",
    "jamba": "Jamba, dense and with experts",
    "falcon": "Falcon 7B, 40B, 180B",
    "falcon-h1": "Falcon-H1",
    "granitehybrid": "Granite 4 hybrid, dense and with experts",
    "nemotron": "Nemotron-4, Minitron",
    "nemotron_h": "Nemotron-H, Nemotron Nano 2",
    "nemotron_h_moe": "Nemotron 3 Nano",
    "rwkv7": "RWKV-7 World, Goose",
    "phi2": "Phi-1, Phi-1.5, Phi-2",
    "phi3": "Phi-3, Phi-4",
    "phimoe": "Phi-3.5-MoE",
    "gemma": "Gemma 1",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "plamo3": "PLaMo 3",
    "gemma3n": "Gemma 3n, its text part",
    "gemma4": "Gemma 4 E2B, E4B, 12B, 26B-A4B, 31B, their text part",
    "chatglm": "ChatGLM 2 and 3, GLM-4-9B",
    "glm4": "GLM-4",
    "glm4moe": "GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7",
    "bailingmoe2": "Ling 2, Ring 2",
    "gpt-oss": "gpt-oss-20b, gpt-oss-120b",
    "cohere2": "Command R7B, Command A",
    "cohere2moe": "Command A+",
    "command-r": "Command R",
    "plamo": "PLaMo-13B",
    "starcoder2": "StarCoder 2",
    "jais2": "Jais 2",
    "starcoder": "StarCoder 1, SantaCoder",
    "codeshell": "CodeShell",
    "gpt2": "GPT-2",
    "gptneox": "GPT-NeoX, Pythia",
    "baichuan": "Baichuan 7B, 13B, Baichuan 2 7B, 13B",
    "mpt": "MPT 7B, 30B",
    "bloom": "BLOOM, BLOOMZ",
    "refact": "Refact 1.6B",
    "olmo": "OLMo 1",
    "olmo2": "OLMo 2, OLMo 3",
    "bitnet": "BitNet b1.58, BitNet 2B4T",
    "minimax-m2": "MiniMax-M2",
    "minimax-m3": "MiniMax M3, its text part",
    "mimo2": "MiMo V2 Flash",
    "step35": "Step 3.5 Flash, Step 3.7 Flash, its text part",
    "lfm2": "LFM2",
    "lfm2moe": "LFM2 with experts",
    "apertus": "Apertus 8B, 70B",
    "muse-glimmer": "Muse-Glimmer-30B, its text part",
    "olmoe": "OLMoE-1B-7B",
    "dbrx": "DBRX",
    "grok": "Grok-1, Grok-2 up to 1,024 tokens",
    "smallthinker": "SmallThinker 4B-A0.6B, 21B-A3B",
    "arctic": "Snowflake Arctic",
    "dots1": "dots.llm1",
    "exaone-moe": "K-EXAONE-236B-A23B",
    "laguna": "Laguna XS, S, M",
    "afmoe": "Trinity Nano, Mini, Large",
    "stablelm": "StableLM 3B, StableLM 2 1.6B",
    "orion": "Orion-14B",
    "granite": "dense Granite 3 and 4",
    "granitemoe": "Granite 3 with experts",
    "granite_swa": "Granite Swash, dense and with experts",
    "minicpm": "MiniCPM 1, 2 and 4",
    "minicpm3": "MiniCPM3-4B",
    "smollm3": "SmolLM3",
    "exaone": "EXAONE 3, 3.5 and Deep",
    "exaone4": "EXAONE 4",
    "seed_oss": "Seed-OSS",
    "ernie4_5": "dense ERNIE 4.5",
    "ernie4_5-moe": "ERNIE 4.5 with experts",
    "hunyuan-dense": "dense Hunyuan",
    "hunyuan_vl": "HunyuanOCR, its text part",
    "maincoder": "Maincoder-1B",
    "hunyuan-moe": "Hunyuan-A13B",
    "hy_v3": "Hunyuan 3",
    "hy_v4": "Hunyuan 4",
}
ARCHITECTURES = tuple(MODELS)  # they generate text
ENCODERS = {  # they compute only embeddings
    "bert": "BERT, RoBERTa, XLM-R, such as BGE, E5, MiniLM, bge-m3",
    "nomic-bert": "nomic-embed-text 1, 1.5",
    "nomic-bert-moe": "nomic-embed-text 2",
    "jina-bert-v2": "jina-embeddings-v2",
    "jina-bert-v3": "jina-embeddings-v3",
    "modern-bert": "ModernBERT, granite-embedding R2, gte-reranker",
    "gemma-embedding": "EmbeddingGemma",
    "eurobert": "EuroBERT, jina-embeddings-v5",
    "neo-bert": "NeoBERT",
}


def load_model(gguf: GGUF, with_heads: bool = False, head: str | None = None) -> Model:
    """Load a file's model, and its multi-token prediction head if `with_heads` is set. `head` is the path of
    an EAGLE-3 file. Its tensors are added to `gguf`. Raises GGUFError, and UnsupportedModel with a list of
    the architectures."""
    gguf.with_heads = with_heads
    model = _load(gguf)
    return model if head is None else _with_head(model, gguf, head)


def _with_head(target: Model, gguf: GGUF, path: str) -> Model:
    head = GGUF.open(path)
    try:
        if head.architecture != eagle3.ARCHITECTURE:
            raise UnsupportedModel(
                f"{path}: architecture {head.architecture!r} is not an EAGLE-3 head; a model that drafts "
                "needs --spec-type draft-simple"
            )
        check_vocabulary(gguf, head)
        assert isinstance(target, Decoder)
        return WithHead(target, gguf, head)
    except BaseException as error:
        if gguf.draft_head is None:
            head.close()
        if isinstance(error, InvalidArgument) and not error.argument:  # a RoPE table refused the values
            raise GGUFError(f"{path}: {error}") from None
        raise


def _load(gguf: GGUF) -> Model:
    name = gguf.architecture
    if name == eagle3.ARCHITECTURE:
        raise UnsupportedModel(
            f"{gguf.paths[0]}: an EAGLE-3 head drafts for its model, and is no model; give the model with -m "
            "and the head with -md --spec-type draft-eagle3"
        )
    if name not in (known := (*ARCHITECTURES, *ENCODERS)):
        near = get_close_matches(name, known, 1, 0.5)
        nearest = f", of which {near[0]!r} has the nearest name" if near else ""
        raise UnsupportedModel(
            f"{gguf.paths[0]}: architecture {name!r} is not supported; "
            f"supported are: {', '.join(known)}{nearest}"
        )
    class_ = model_class(name)
    if gguf.with_heads:
        check_heads(gguf, class_)
    try:
        model: Model = class_(gguf)
    except InvalidArgument as error:  # a RoPE table refused the file's values
        raise GGUFError(f"{gguf.paths[0]}: {error}") from None
    return model


def check_heads(gguf: GGUF, class_: Any) -> None:
    """Raise UnsupportedModel if the file has no multi-token prediction head that its architecture can use."""
    name, path = gguf.architecture, gguf.paths[0]
    if not class_.predicts_ahead:
        able = ", ".join(arch for arch in ARCHITECTURES if model_class(arch).predicts_ahead)
        raise UnsupportedModel(
            f"{path}: drafts by multi-token prediction (mtp) are not supported for {name}; "
            f"supported are: {able}"
        )
    key = f"{name}.nextn_predict_layers"
    n = int(gguf.u32(key, 0))
    if not n:
        raise UnsupportedModel(f"{path}: the file has no multi-token prediction head (mtp): {key} is 0")
    if n > 1:
        raise UnsupportedModel(
            f"{path}: {key} = {n} is not supported with mtp; files with one multi-token prediction head are"
        )
    first = f"blk.{int(gguf.u32(f'{name}.block_count')) - 1}.nextn.eh_proj.weight"
    if first not in gguf.tensors:
        raise UnsupportedModel(
            f"{path}: the file lacks its multi-token prediction head (mtp): {first} is missing; use a file "
            "that was converted with the head"
        )


def model_class(name: str) -> Any:
    return _module(name).Model


def _module(name: str) -> Any:
    return import_module(f"vkbackend.models.architectures.{name.replace('-', '_')}")
