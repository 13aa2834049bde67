"""Random bodies with images for every endpoint that takes them."""

from __future__ import annotations

import json
import random
from base64 import b64encode
from pathlib import Path
from typing import Any

from pictures import encoded, picture
from places import DATA
from serving import Command
from tiny_vision import write_projector

from fuzz.bodies import VALUES, changed, keep_short
from fuzz.damage import damaged
from fuzz.kind import Wrong
from fuzz.pictures import PIECES, sources
from fuzz.requests import Client

MARK = "<__media__>"
N_EMBD = 64  # of the text model
SQUARE = b64encode(encoded(picture("RGB", 24, 24), "PNG")).decode()
KNOWN = json.dumps({"prompt": {"prompt_string": f"a {MARK} b", "multimodal_data": [SQUARE]}, "n_predict": 3,
                    "temperature": 0}).encode()  # fmt: skip
ROW = -34438478134891761  # A row of an image has an id like this, which clients must not send.
URLS: tuple[Any, ...] = (
    "data:", "data:,", "data:;base64,", "data:image/png;base64,!", "data:image/png;base64,AAAA",
    "DATA:;BASE64,QQ==", "data:image/png;charset=utf-8;base64,QQ==", "data:text/html;base64,PGI+",
    "data:image/svg+xml;base64,PHN2Zy8+", "data:image/png," + SQUARE, "data:image/png;base64, " + SQUARE,
    f"data:;base64,{SQUARE}\n", SQUARE, "data:image/png;base64," + "A" * 100_000, "http://127.0.0.1:1/a.png",
    "https://a.example/b", "file:///etc/passwd", "/etc/passwd", "ftp://a", "a:b:c",
    {"url": None}, {"url": 3}, {"url": []}, {"detail": "high"}, [SQUARE],
)  # fmt: skip
TEXTS = MARK, MARK * 3, f"{MARK}{MARK}", "<__media__", "a <__image__> b", "\ud800", "<image>", "a" * 500
IDS: tuple[Any, ...] = (
    [ROW], [1, ROW, ROW - 1, 3], [[1, 2], [ROW]], [-1], [1, -(1 << 55)], [-(1 << 63), 1 << 63],
    [1, MARK], [{"prompt_string": MARK, "multimodal_data": [SQUARE]}, [1], "a"],
)  # fmt: skip


def url(text: str) -> str:
    return f"data:image/png;base64,{text}"


def bodies(files: list[str]) -> dict[str, list[dict[str, Any]]]:
    parts = [{"type": "image_url", "image_url": {"url": url(text)}} for text in files]
    inputs: list[dict[str, Any]] = [{"type": "input_image", "image_url": url(text)} for text in files]
    blocks: list[dict[str, Any]] = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text}}
        for text in files
    ]
    chat = {
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "Hi"}]}],
        "max_tokens": 1,
    }
    called: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": blocks}]},
    ]
    message = {"messages": [{"role": "user", "content": [*blocks, {"type": "text", "text": "Hi"}]}]}
    answer = {"input": [{"role": "user", "content": [*inputs, {"type": "input_text", "text": "Hi"}]}]}
    prompt = {"prompt_string": f"a {MARK * len(files)} b", "multimodal_data": files}
    return {
        "/v1/chat/completions": [chat, chat | {"stream": True, "n": 2}],
        "/v1/chat/completions/input_tokens": [chat],
        "/apply-template": [chat],
        "/v1/messages": [message | {"max_tokens": 1}, {"messages": called, "max_tokens": 1}],
        "/v1/messages/count_tokens": [message],
        "/v1/responses": [answer | {"max_output_tokens": 1}],
        "/completion": [{"prompt": prompt, "n_predict": 1}, {"prompt": [prompt, "a"], "n_predict": 1}],
        "/v1/completions": [{"prompt": prompt, "max_tokens": 1, "n": 2}],
        "/infill": [{"input_prefix": prompt, "input_suffix": "a", "n_predict": 1}],
        "/tokenize": [{"content": prompt}, {"content": MARK}],
        "/detokenize": [{"tokens": [1, ROW, 3]}],
        "/v1/embeddings": [{"input": prompt}],
    }


PATHS = list(bodies([SQUARE]))


def with_images_changed(rng: random.Random, value: Any) -> Any:
    """Return JSON in which one image, one text with marks, or one list of token ids is replaced by another
    value."""
    if isinstance(value, str):
        return rng.choice((*URLS, *TEXTS, *VALUES, value[: rng.randrange(len(value) + 1)]))
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], with_images_changed(rng, value[at]), *value[at + 1 :]]
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        return value | {name: with_images_changed(rng, value[name])}
    return rng.choice((*URLS, *IDS, *VALUES))


class ImageBodies:
    """A case is a path, a line break, and a body. The server runs a real engine with a projector. A known
    image must get the same text each time, whatever cases came before."""

    deadline_s = 120.0  # The first case also starts the server.

    def __init__(self, folder: Path) -> None:
        self._folder, self._sources = folder, sources()
        self.client: Client | None = None  # the client of the server, which the first case starts
        self._text = ""

    def _files(self, rng: random.Random) -> list[str]:
        """Return 1 to 3 images, or 200. Some images have damaged bytes or truncated base64."""
        texts = []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            data = rng.choice(self._sources)
            text = b64encode(damaged(rng, data, PIECES) if rng.random() < 0.3 else data).decode()
            texts.append(text[: rng.randrange(len(text) + 1)] if rng.random() < 0.1 else text)
        return texts if rng.random() < 0.98 else texts[:1] * rng.choice((16, 17, 200))

    def make(self, rng: random.Random) -> bytes:
        if rng.random() < 0.05:
            return b"/completion\n" + KNOWN
        path = rng.choice(PATHS)
        full = rng.choice(bodies(self._files(rng))[path])
        body: Any = full
        for _ in range(rng.choice((0, 1, 1, 2))):
            body = (changed if rng.random() < 0.2 else with_images_changed)(rng, body)
            if not isinstance(body, dict):
                break
        keep_short(body, full)
        return path.encode() + b"\n" + json.dumps(body).encode()

    def _start(self) -> Client:
        projector = write_projector(self._folder / "mmproj.gguf", N_EMBD)
        model = str(DATA / "stories-narrow-F16.gguf")
        command = Command(
            "-m", model, "-mm", str(projector), "-np", "2", "-c", "128", "-n", "1", "--log-disable"
        )
        return Client(command.address.port)

    def check(self, case: bytes) -> str:
        self.client = self.client or self._start()
        path, _, body = case.partition(b"\n")
        if path.decode(errors="replace") not in PATHS:
            return "no case"
        status, answer = self.client.answer(path.decode(), body)
        if body == KNOWN:
            text = json.loads(answer)["content"] if status == 200 else f"status {status}"
            self._text = self._text or text
            if text != self._text:
                raise Wrong(f"{path.decode()} another text for a known image: {text!r}, not {self._text!r}")
        return "accepted" if status == 200 else "refused"
