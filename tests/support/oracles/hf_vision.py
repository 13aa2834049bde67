"""Computes the rows of a projector with Hugging Face `transformers`, in float32 with eager attention.

Complete models (`COMPLETE`) also have a text model. It is random here, and make_image_logits.py replaces it.
"""

from __future__ import annotations

# Each file adds its families to ROWS and COMPLETE.
from oracles import hf_vision_gemma, hf_vision_qwen, hf_vision_siglip, hf_vision_vit  # noqa: F401
from oracles.hf_vision_parts import COMPLETE, ROWS, TEXT

__all__ = ["COMPLETE", "ROWS", "TEXT"]
