"""Makes `golden/images.npz`, transformers' logits of the last tokens of image_cases.py's prompts, in float32.
Arrays of prompts with a picture of vision.py are named `picture/NAME`. If transformers has a class for both
the encoder and the text model, this class computes the logits from pixels. transformers has no class for
MiniCPM-V before version 4.6. So the text model Qwen3 gets the rows of MiniCPM-V's encoder (hf_vision.py). The
same holds for the slices that transformers' processor cuts (`sliced/minicpmv`).

    PYTHONPATH=tests/support python tests/support/oracles/make_image_logits.py

Needs torch, transformers and Pillow.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import transformers
from oracles import hf, hf_pictures, hf_vision, hf_vision_siglip
from oracles.fixtures import build as build_text
from oracles.hf_parts import BUILDERS, common, rope
from oracles.image_cases import (
    BOTH_WAYS,
    BREAK,
    N_TEXT,
    NAMES,
    SLICED,
    TEXT_OF,
    Case,
    case,
    of_picture,
    of_slices,
)
from oracles.vision import BUILDERS as PROJECTORS
from oracles.vision import build, lines_of
from pictures import blocks
from places import GOLDEN
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gemma4 import modeling_gemma4
from vision_configs import vision_config

MERGE = 2  # patches per row and side, which only `get_rope_index` reads


def embedded(network: Any, c: Case) -> torch.Tensor:
    """Return the embeddings of the tokens, as the network scales them, and the rows of images."""
    h = network.get_input_embeddings()(torch.tensor([c.tokens])).clone()
    for first, values in c.images.items():
        h[0, first : first + len(values)] = torch.from_numpy(values[:, : h.shape[-1]])
    return h


def qwen(c: Case) -> torch.Tensor:
    """Run the text model of Qwen2-VL, Qwen3-VL or GLM-4.1V, with the positions of the complete model."""
    name = {"qwen3vl": "Qwen3VL", "glm4": "Glm4v"}.get(c.fixture.arch, "Qwen2VL")
    sections: dict[str, Any] = {"mrope_section": c.fixture.keys["rope.dimension_sections"][:3]}
    if name == "Qwen3VL":
        sections["mrope_interleaved"] = True
    if name == "Glm4v":
        sections["partial_rotary_factor"] = 0.5
    text = common(c.fixture, rope_parameters=rope(c.fixture, **sections))
    vision = {"depth": 1, "spatial_merge_size": MERGE}
    special = {"image_token_id": 0, "vision_start_token_id": 127, "vision_end_token_id": 126}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **special)
    config._attn_implementation = "eager"
    complete = getattr(transformers, f"{name}Model")._from_config(config, dtype=torch.float32).eval()
    network = complete.language_model
    state = {
        k: torch.from_numpy(np.ascontiguousarray(v))
        for k, v in BUILDERS[c.fixture.name](build_text(c.fixture.name))[1].items()
    }
    network.load_state_dict({k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")})
    ids, types = torch.tensor([c.tokens]), torch.from_numpy(c.is_image).int()[None]
    grids = torch.tensor([(1, MERGE * height, MERGE * width) for height, width in c.grids.values()])
    positions, _ = complete.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=grids)
    how: dict[str, Any] = {}
    n_embd = c.fixture.keys["embedding_length"]
    values = np.concatenate(list(c.images.values()))
    if tables := values.shape[1] // n_embd - 1:
        of_layer = [values[:, (1 + i) * n_embd : (2 + i) * n_embd] for i in range(tables)]
        how["deepstack_visual_embeds"] = [torch.from_numpy(np.ascontiguousarray(v)) for v in of_layer]
        how["visual_pos_masks"] = types.bool()
    h = network(inputs_embeds=embedded(network, c), position_ids=positions, use_cache=False, **how)
    return h.last_hidden_state[0] @ state["lm_head.weight"].T


def gemma(c: Case) -> torch.Tensor:
    network = hf.model(c.fixture)
    h, how = embedded(network, c), dict[str, Any]()
    if c.fixture.name in BOTH_WAYS:
        module: Any = modeling_gemma3 if c.fixture.arch == "gemma3" else modeling_gemma4
        types = torch.from_numpy(c.is_image).int()[None]
        blocks = module.get_block_sequence_ids_for_mask(types, h.device)
        at = torch.tensor([c.positions])
        how["attention_mask"] = module.create_masks_for_vision_model(
            config=network.config,
            inputs_embeds=h,
            attention_mask=None,
            past_key_values=None,
            position_ids=at,
            block_sequence_ids=blocks,
        )
    if c.fixture.keys.get("embedding_length_per_layer_input"):
        # The rows of images have the padding token 0.
        how["per_layer_inputs"] = network.model.get_per_layer_inputs(torch.tensor([c.tokens]), None)
    return network(inputs_embeds=h, use_cache=False, **how).logits[0]


def with_picture(name: str) -> torch.Tensor:
    m = build(name)
    c = of_picture(name, hf_vision.ROWS[name](build(name)))
    if name.startswith(("gemma", "qwen", "glm")):
        return of_rows(c)
    if name == "minicpmv":
        return of_text(c)
    [first] = c.images
    ids = torch.tensor([c.tokens])
    if name.startswith("pixtral"):
        n = (len(c.images[first]) + 1) // lines_of(m)
        ids[0, first + n - 1 : first + len(c.images[first]) : n] = BREAK
    network, how = hf_vision.COMPLETE[name](m)
    text = hf.model(c.fixture)
    if name == "llama4":
        network.language_model = text
        return network(input_ids=ids, use_cache=False, **how).logits[0]
    setattr(network, "text_model" if name == "idefics3" else "language_model", text.model)
    h = network(input_ids=ids, use_cache=False, **how).last_hidden_state[0]
    return text.lm_head(h)


def of_text(c: Case) -> torch.Tensor:
    network = hf.model(c.fixture)
    return network(inputs_embeds=embedded(network, c), use_cache=False).logits[0]


def sliced() -> torch.Tensor:
    pixels = blocks(*SLICED, seed=34)
    tiles = hf_pictures.tiles(vision_config("resampler", patch_size=56), pixels)
    rows = [hf_vision_siglip.resampled(build("minicpmv"), torch.from_numpy(tile)[None]) for tile in tiles]
    return of_text(of_slices(rows[-1], rows[:-1]))


def of_rows(c: Case) -> torch.Tensor:
    return (gemma if c.fixture.arch.startswith("gemma") else qwen)(c)


@torch.no_grad()
def main() -> None:
    assert TEXT_OF.keys() == PROJECTORS.keys()
    logits = {name: of_rows(case(name)) for name in NAMES}
    logits |= {f"picture/{name}": with_picture(name) for name in TEXT_OF}
    logits["sliced/minicpmv"] = sliced()
    logits = {name: rows.numpy()[-N_TEXT[-1] :] for name, rows in logits.items()}
    np.savez_compressed(GOLDEN / "images.npz", about=json.dumps({"made by": hf.versions()}), **logits)


if __name__ == "__main__":
    main()
