"""Test images in the requests of every API, with a real model and projector."""

from __future__ import annotations

import base64
import http.client
import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from fuzz.image_bodies import KNOWN, ImageBodies
from fuzz.requests import Client
from PIL import Image
from places import ROOT
from serving import HANG_S, Address, Command, one_model, served
from tiny_vision import write_projector

from vkbackend import LLM
from vkbackend.errors import InvalidArgument
from vkbackend.models.vision.limits import ImageLimits
from vkbackend.tools.demo.shapes import new_picture
from vkbackend.tools.server.front import Config
from vkbackend.tools.server.limits import Limits
from vkbackend.tools.server.media_fetch import checked

pytestmark = pytest.mark.no_vulkan

N_ROWS = 4
N, N_ALL = 12, 3000
OPTIONS = {"max_tokens": 6, "temperature": 0}


def png(*rgb: int) -> str:
    buffer = BytesIO()
    Image.new("RGB", (80, 50), rgb).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


RED, BLUE = png(200, 20, 20), png(20, 20, 200)
URL = f"data:image/png;base64,{RED}"
PARTS = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "Once upon"}]


@pytest.fixture(scope="module")
def llm(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    projector = write_projector(tmp_path_factory.mktemp("vision") / "mmproj.gguf", 64)
    path = models / "stories-narrow-F16.gguf"
    with LLM(path, devices="numpy", mmproj=projector, n_ctx=256, n_slots=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def address(llm: LLM) -> Iterator[Address]:
    config = Config(llm.path, "fake", is_verbose=True)
    with served(llm, config) as address:  # type: ignore[arg-type]
        yield address


@pytest.fixture(scope="module")
def expected(llm: LLM) -> Any:
    return llm.chat([{"role": "user", "content": PARTS}], 6, temperature=0)


def test_chat_completions(address: Address, expected: Any) -> None:
    body = OPTIONS | {"messages": [{"role": "user", "content": PARTS}]}
    status, answer, _ = address.request("POST", "/v1/chat/completions", body)
    assert status == 200 and answer["choices"][0]["message"]["content"] == expected.content
    n_prompt = len(expected.completion.prompt_tokens)
    assert answer["usage"]["prompt_tokens"] == n_prompt
    timings = answer["timings"]
    assert timings["image_n"] == 1 and timings["image_cache_n"] == 1, "the fixture computed the image"
    assert timings["image_ms"] == 0 == timings["image_encode_ms"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > N_ROWS
    count = address.request("POST", "/v1/chat/completions/input_tokens", body)[1]
    assert count["input_tokens"] == n_prompt
    other = [{"type": "image_url", "image_url": f"data:;base64,{BLUE}"}, PARTS[1]]
    answer = address.request("POST", "/v1/chat/completions", body | {"messages": [
        {"role": "user", "content": other}]})[1]  # fmt: skip
    assert answer["timings"]["image_cache_n"] == 0 and answer["timings"]["image_encode_ms"] > 0
    assert answer["choices"][0]["message"]["content"] != expected.content


def test_responses_and_messages(address: Address, expected: Any) -> None:
    parts = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "Once upon"}]
    body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 6, "temperature": 0}
    status, answer, _ = address.request("POST", "/v1/responses", body)
    assert status == 200, answer
    assert answer["output"][0]["content"][0]["text"] == expected.content
    source = {"type": "base64", "media_type": "image/png", "data": RED}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "Once upon"}]
    body = OPTIONS | {"messages": [{"role": "user", "content": blocks}]}
    status, answer, _ = address.request("POST", "/v1/messages", body)
    assert status == 200, answer
    assert answer["content"][0]["text"] == expected.content
    count = address.request("POST", "/v1/messages/count_tokens", body)[1]
    assert count["input_tokens"] == len(expected.completion.prompt_tokens)
    result = {"type": "tool_result", "tool_use_id": "c1", "content": blocks, "is_error": True}
    body["messages"] = [{"role": "user", "content": [result]}]
    assert address.request("POST", "/v1/messages", body)[0] == 200


def test_completion_with_multimodal_data(address: Address, llm: LLM) -> None:
    prompt = {"prompt_string": "Once <__media__> upon", "multimodal_data": [RED]}
    body = {"prompt": prompt, "n_predict": 6, "temperature": 0}
    status, answer, _ = address.request("POST", "/completion", body)
    image = prompt | {"multimodal_data": [base64.b64decode(RED)]}
    direct = llm.generate(image, 6, temperature=0)
    assert status == 200 and answer["content"] == direct.text
    assert answer["tokens_evaluated"] == len(direct.prompt_tokens)
    assert answer["prompt"] == "Once <__media__> upon"
    events = address.events("/v1/completions", {"prompt": prompt, "max_tokens": 6, "temperature": 0,
                                                "stream": True})  # fmt: skip
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == direct.text
    for wrong in ("/etc/passwd", "!", 3, URL):
        refused = address.request("POST", "/completion", {"prompt": prompt | {"multimodal_data": [wrong]}})
        assert refused[0] == 400 and "multimodal_data[0]" in refused[1]["error"]["message"]
    refused = address.request("POST", "/completion", {"prompt": {"multimodal_data": [RED]}})
    assert refused[0] == 400 and "prompt_string is missing" in refused[1]["error"]["message"]


def test_the_images_of_several_prompts_are_counted_together(address: Address) -> None:
    def refusal(*counts: int) -> str:
        prompts = [{"prompt_string": "x", "multimodal_data": [RED] * n} for n in counts]
        status, answer, _ = address.request("POST", "/completion", {"prompt": prompts, "n_predict": 1})
        assert status == 400
        return str(answer["error"]["message"])

    assert "17 images, at most 16" in refusal(9, 8)
    assert "200 images, at most 16" in refusal(200)


def test_the_pixels_of_a_request_are_limited(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vkbackend.models.pictures.IMAGE_LIMITS", ImageLimits(request_pixels=3 * 4000))
    prompts = [{"prompt_string": "x", "multimodal_data": [RED] * 2}] * 2
    status, answer, _ = address.request("POST", "/completion", {"prompt": prompts, "n_predict": 1})
    assert status == 400 and "16000 pixels, and at most 12000" in answer["error"]["message"]
    monkeypatch.setattr("vkbackend.models.pictures.IMAGE_LIMITS", ImageLimits(request_pixels=7999))
    blue = {"type": "image_url", "image_url": {"url": f"data:;base64,{BLUE}"}}
    body = {"messages": [{"role": "user", "content": [PARTS[0], blue]}], "max_tokens": 1}
    status, answer, _ = address.request("POST", "/v1/chat/completions", body)
    assert status == 400 and "8000 pixels, and at most 7999" in answer["error"]["message"], answer


def url_part(url: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


SVG = "data:image/svg+xml;base64," + base64.b64encode(b"<svg xmlns='http://www.w3.org/2000/svg'/>").decode()


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (url_part("https://images.example.com/a.png"), "nothing is fetched"),
        (url_part("http://127.0.0.1/a.png"), "nothing is fetched"),
        (url_part("file:///etc/passwd"), "nothing is fetched"),
        (url_part("/etc/passwd"), "nothing is fetched"),
        (url_part("data:image/png;base64,!!!!"), "not valid base64"),
        (url_part("data:text/html;base64,PGh0bWw+"), "text/html"),
        (url_part(SVG), "SVG"),
        (url_part(URL[:-40]), "picture"),
        (url_part(None), "expected a data URL"),
        (url_part(URL) * 17, "17 images, at most 16"),
        ([{"role": "user", "content": url_part(URL)[0]["content"] * 200}], "200 images, at most 16"),
        ([{"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]}], "image_url"),
        ([{"role": "system", "content": PARTS}], "not of 'system'"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "input_audio"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ["x"]}}]}],
            "expected a data",
        ),
    ],
)
def test_refused_images(address: Address, messages: list[Any], why: str) -> None:
    status, answer, _ = address.request(
        "POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 1}
    )
    assert status == 400 and why in answer["error"]["message"]
    assert answer["error"]["param"].startswith("messages")


def test_refused_forms_of_other_apis(address: Address) -> None:
    for source, why in (
        ({"type": "url", "url": "https://a.example/b.png"}, "nothing is fetched"),
        ({"type": "file", "file_id": "f1"}, "expected base64"),
        ({"type": "base64"}, "data is missing"),
    ):
        content = [{"type": "image", "source": source}]
        body = {"max_tokens": 1, "messages": [{"role": "user", "content": content}]}
        status, answer, _ = address.request("POST", "/v1/messages", body)
        assert status == 400 and why in answer["error"]["message"], answer
    item = {"role": "user", "content": [{"type": "input_image", "file_id": "f1"}]}
    status, answer, _ = address.request("POST", "/v1/responses", {"input": [item]})
    assert status == 400 and "files are not stored" in answer["error"]["message"]


def test_the_server_says_that_the_model_sees(address: Address) -> None:
    props = address.get("/props")[1]
    assert props["modalities"] == {"vision": True, "video": False, "audio": False}
    status, stats, _ = address.get("/stats")
    assert status == 200 and len(stats["devices"]) == 2 and "n_slots" in stats["engine"]
    assert stats["devices"][1]["name"].endswith("(projector)") and stats["devices"][1]["weights"] > 0
    listed = address.get("/v1/models")[1]
    assert listed["models"][0]["capabilities"] == ["completion", "multimodal"]
    assert listed["data"][0]["architecture"]["input_modalities"] == ["text", "image"]


@pytest.mark.timeout(3000)
def test_random_bodies_with_images(address: Address, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    n, seed = N_ALL if request.config.getoption("--all") else N, random.randrange(1 << 30)
    rng, bodies = random.Random(seed), ImageBodies(tmp_path)
    bodies.client = Client(address.port)
    known = b"/completion\n" + KNOWN
    for i in range(n):
        case = bodies.make(rng) if i else known
        try:
            bodies.check(case)
        except Exception as error:
            raise AssertionError((seed, case)) from error
    assert bodies.check(known) == "accepted", "the same text as before the other bodies"
    bodies.client.close()


def reconfigured(address: Address, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    assert address.server is not None
    service = address.server.service
    monkeypatch.setattr(service, "config", replace(service.config, **changed))


def test_files_of_an_allowed_host(address: Address, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetch(name: str, url: str, allowed: tuple[str, ...]) -> bytes:
        checked(name, url, allowed)
        asked.append(url)
        return base64.b64decode(RED)

    monkeypatch.setattr("vkbackend.tools.server.images.fetch", fetch)
    reconfigured(address, monkeypatch, media_hosts=("images.example.com",))
    url = "https://images.example.com/red.png"
    for part, status in ((url, 200), ("https://other.example.com/red.png", 400)):
        messages = [{"role": "user", "content": [*url_part(part)[0]["content"], PARTS[1]]}]
        answer = address.request("POST", "/v1/chat/completions", OPTIONS | {"messages": messages})
        assert answer[0] == status, answer
        if status == 200:
            assert answer[1]["choices"][0]["message"]["content"] == expected.content
    blocks = [{"type": "image", "source": {"type": "url", "url": url}}, PARTS[1]]
    body = OPTIONS | {"messages": [{"role": "user", "content": blocks}]}
    assert address.request("POST", "/v1/messages", body)[0] == 200
    assert asked == [url, url]


def test_images_wait_in_the_queue(address: Address, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """While images are encoded, their requests count as waiting."""
    assert llm.pictures is not None
    entered, leave = threading.Event(), threading.Event()

    def prepared(*args: Any) -> Any:
        entered.set()
        assert leave.wait(30)
        raise InvalidArgument("late")

    monkeypatch.setattr(llm.pictures, "prepared", prepared)
    monkeypatch.setattr(address.server.service.admission, "limits", Limits(queue=0))  # type: ignore
    body = OPTIONS | {"messages": [{"role": "user", "content": PARTS}], "n": 2}
    thread = threading.Thread(target=address.request, args=("POST", "/v1/chat/completions", body))
    thread.start()
    assert entered.wait(30)
    assert address.request("POST", "/v1/chat/completions", body)[0] == 429
    leave.set()
    thread.join()


@pytest.mark.wide
def test_streams_with_images_continue_after_the_engine_is_killed(
    models: Path, tmp_path: Path, expected: Any
) -> None:
    """The new engine gets the rows that the first engine computed."""
    projector = write_projector(tmp_path / "mmproj.gguf", 64)
    command = Command("-m", str(models / "stories-narrow-F16.gguf"), "--mmproj", str(projector), "-c", "512")
    body = {"messages": [{"role": "user", "content": PARTS}], "max_tokens": 24, "temperature": 0,
            "ignore_eos": True}  # fmt: skip
    for path, blocks in (("/v1/chat/completions", body), ("/completion", {
        "prompt": {"prompt_string": "Once <__media__> upon", "multimodal_data": [RED]}, "n_predict": 24,
        "temperature": 0, "ignore_eos": True,
    })):  # fmt: skip
        whole = command.address.post(path, blocks)[1]
        connection = http.client.HTTPConnection("127.0.0.1", command.address.port, timeout=HANG_S)
        connection.request("POST", path, json.dumps(blocks | {"stream": True}))
        text, n_events = "", 0
        for line in connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            assert "error" not in event, event
            choice = (event.get("choices") or [event])[0]
            text += choice.get("content") or choice.get("delta", {}).get("content") or ""
            n_events += 1
            if n_events == 8:
                os.kill(command.engine(), signal.SIGKILL)
        chosen = (whole.get("choices") or [{"message": whole}])[0]["message"]
        assert text == chosen["content"]
    assert "".join(command.log).count("reopening it") == 2
    assert command.end() == 0, command.log


@pytest.mark.wide
def test_many_clients_get_the_description_of_their_own_picture() -> None:
    """The vision demo describes pictures that it never saw, while other requests run."""
    folder = ROOT / "models" / "demo"
    files = "-m", str(folder / "demo-vision.gguf"), "--mmproj", str(folder / "mmproj-demo-vision.gguf")
    with one_model(*files, "-c", "512", "-np", "4") as address:

        def describe(number: int) -> tuple[str, str]:
            pixels, scene = new_picture(number)
            buffer = BytesIO()
            Image.fromarray(pixels).save(buffer, "PNG")
            url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
            body = {"messages": url_part(url), "max_tokens": 40, "temperature": 0}
            answer = address.request("POST", "/v1/chat/completions", body)[1]
            return answer["choices"][0]["message"]["content"].strip(), scene.sentence

        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(describe, range(24)))
    right = sum(answer == sentence for answer, sentence in answers)
    assert right >= 22, [pair for pair in answers if pair[0] != pair[1]]
