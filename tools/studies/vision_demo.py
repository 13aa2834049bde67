"""Count the pictures that the vision demo describes word for word: `python -m
vkbackend.tools.studies.vision_demo -dev 0,1`. Half of the pictures show only shapes that training held out.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from vkbackend.models.llm import LLM
from vkbackend.tools.demo.shapes import new_picture
from vkbackend.tools.flags.text import vision_demo


def described(llm: LLM, n: int, held_out: bool) -> list[bool]:
    """Return whether each of n new pictures is described exactly. With `held_out`, training drew none of
    their shapes in this colour and place."""
    prompts, sentences = list[Mapping[str, Any]](), list[str]()
    for number in range(n):
        pixels, scene = new_picture(number, held_out)
        png = io.BytesIO()
        Image.fromarray(pixels).save(png, "PNG")
        prompts.append({"prompt_string": "", "multimodal_data": [png.getvalue()]})
        sentences.append(scene.sentence)
    answers = llm.generate(prompts, max_tokens=40, temperature=0)
    return [a.text.strip() == s for a, s in zip(answers, sentences, strict=True)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "-dev", default="0", help="devices with equal shares, separated by commas (default: %(default)s)"
    )
    parser.add_argument("-n", type=int, default=200, help="pictures of each kind (default: %(default)s)")
    args = parser.parse_args(argv)
    model, mmproj = vision_demo()
    devices = args.dev.split(",")
    shares = [1.0] * len(devices)  # also for slow devices
    with LLM(model, devices=devices, tensor_split=shares, mmproj=mmproj, n_ctx=64, n_slots=8) as llm:
        for name, held_out in (("new pictures", False), ("shapes that training held out", True)):
            right = sum(described(llm, args.n, held_out))
            print(f"-dev {args.dev}: {name}: {right} of {args.n} ({right / args.n:.1%})", flush=True)


if __name__ == "__main__":
    main()
