"""Tokenizes a prompt with images, and reads prompts in which `<__media__>` marks the places of images."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vkbackend.checks import items, refused
from vkbackend.errors import InvalidArgument
from vkbackend.models.arguments import text_of
from vkbackend.models.pictures import (
    NO_VISION,
    ImageTimes,
    MediaPrompt,
    Pictures,
    Piece,
    PreparedImage,
    TileRows,
    check_count,
    media_prompt,
)
from vkbackend.models.text.protection import Prompt
from vkbackend.models.text.tokenizer import Tokenizer
from vkbackend.models.vision.images import image_of

MARKER = "<__media__>"  # as in llama-server
FORM = "expected {'prompt_string': 'text with <__media__>', 'multimodal_data': [an image for each]}"


def pieces_of(
    tokenizer: Tokenizer,
    prompt: Prompt,
    places: Sequence[tuple[int, int, PreparedImage]],
    parse_special: bool = True,
) -> list[Piece]:
    """Return the prompt's tokens without BOS, with the rows of an image in each of `places` (begin, end). The
    projector's family defines the text around the rows, in which special tokens are parsed."""

    def encode(text: Prompt) -> list[int]:
        return tokenizer.encode(text.text, False, parse_special, text.plain)

    pieces: list[Piece] = []
    text, done = Prompt(""), 0
    for begin, end, image in places:
        text += prompt.part(done, begin)
        done = end
        for item in image.layout:
            if isinstance(item, str):
                text += Prompt(item)
            else:
                pieces += [*encode(text), TileRows(image, item)]
                text = Prompt("")
    return [*pieces, *encode(text + prompt.part(done, len(prompt.text)))]


def read_media_prompt(
    tokenizer: Tokenizer, pictures: Pictures | None, prompt: Mapping[str, Any], parse_special: bool = True
) -> list[int] | MediaPrompt:
    """Return the pieces of {"prompt_string": text, "multimodal_data": images}, llama-server's form. Without a
    marker in the text, the images precede the text. Raises InvalidArgument."""
    if set(prompt) - {"prompt_string", "multimodal_data"}:
        raise refused("prompt", prompt, FORM)
    text = text_of("prompt_string", prompt.get("prompt_string", ""))
    given = items("multimodal_data", prompt.get("multimodal_data", ()), FORM)
    check_count("multimodal_data", given)
    if given and pictures is None:
        raise InvalidArgument(f"multimodal_data: {NO_VISION}", argument="multimodal_data")
    if given and MARKER not in text:
        text = MARKER * len(given) + text
    spans = [match.span() for match in re.finditer(re.escape(MARKER), text)]
    if len(spans) != len(given):
        raise InvalidArgument(
            f"prompt_string: {len(spans)} times {MARKER} for {len(given)} images; give one for each image",
            argument="prompt_string",
        )
    times, places = ImageTimes(), []
    for i, ((begin, end), value) in enumerate(zip(spans, given, strict=True)):
        assert pictures is not None
        name = f"multimodal_data[{i}]"
        image = pictures.prepared(image_of(name, value), times, name)
        places.append((begin, end, image))
    pieces = pieces_of(tokenizer, Prompt(text), places, parse_special)
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    return media_prompt([*bos, *pieces], times)
