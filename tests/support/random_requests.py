"""Random requests to a server of several models, each checked against the model alone."""

from __future__ import annotations

import base64
import http.client
import json
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from device_sets import nmse

from vkbackend.models.engine.completion import Completion
from vkbackend.models.llm import LLM

TIE = 1e-3  # Rounding changes a log probability by at most 1e-4 here.
LONGEST_S = 900.0  # A request may wait for several loads on a busy machine.
TEXTS = ("Once upon a time", "The little dog", "A girl named Lily", "One day", "They went to the park and")
# With these options, other requests change neither an answer nor the total memory of all devices.
OPTIONS: dict[str, Any] = {
    "n_ctx": 96, "n_slots": 2, "kv_cells": 96, "exact": True, "use_mmap": False, "n_ubatch": 4096,
}  # fmt: skip
FLAGS = ("-c", "96", "-np", "2", "--exact", "--no-mmap", "-ub", "4096")


@dataclass(frozen=True)
class Known:
    """A request, and the answers of the model alone on each device."""

    model: str
    path: str
    body: Mapping[str, Any]
    answers: Sequence[Any]


def known_requests(models: Mapping[str, Path], devices: Sequence[str], seed: int, n: int) -> list[Known]:
    """Return at most `n` random requests for each model. Encoders get requests for embeddings, and other
    models get requests for text."""
    draw, known = random.Random(seed), list[Known]()
    for name, path in models.items():
        alone = [LLM(path, devices=[device], **OPTIONS) for device in devices]
        for _ in range(n):
            text = f"{draw.choice(TEXTS)} {draw.randrange(100)}"
            if alone[0].is_encoder:
                vectors = [llm.embed(text, pooling="mean") for llm in alone]
                body = {"input": text, "encoding_format": "base64"}
                known.append(Known(name, "/v1/embeddings", body, vectors))
                continue
            body = {"prompt": text, "max_tokens": draw.randrange(1, 24), "ignore_eos": True}
            body |= draw.choice(({"temperature": 0.0}, {"temperature": 1.0, "seed": draw.randrange(1 << 30)}))
            options = {name: value for name, value in body.items() if name != "prompt"}
            answers = [llm.generate(text, **options, logprobs=2) for llm in alone]
            if not (body["temperature"] == 0 and any(map(has_tie, answers))):
                known.append(Known(name, "/v1/completions", body, [answer.text for answer in answers]))
        for llm in alone:
            llm.close()
    return known


def has_tie(answer: Completion) -> bool:
    """Return whether two tokens were almost equally likely. The order of two such tokens depends on the
    number of prompt rows in a step, because this number changes how sums are rounded."""
    rows = answer.logprobs or []
    return any(row.top[0][1] - row.top[1][1] < TIE for row in rows)


@dataclass
class Load:
    """`clients` threads send `n` random requests. `wrong` lists the requests whose answers differ."""

    port: int
    known: Sequence[Known]
    n: int
    seed: int
    clients: int
    wrong: list[Any] = field(default_factory=list)
    answered: dict[str, int] = field(default_factory=dict)
    _left: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        self._left = self.n
        threads = [threading.Thread(target=self._client, args=(i,)) for i in range(self.clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, number: int) -> None:
        draw = random.Random(self.seed * 1000 + number)
        while True:
            with self._lock:
                if not self._left:
                    return
                self._left -= 1
            known = draw.choice(self.known)
            try:
                is_right = self._ask(known, streams=draw.random() < 0.5)
            except (OSError, KeyError, ValueError, http.client.HTTPException) as error:
                is_right = error
            with self._lock:
                self.answered[known.model] = self.answered.get(known.model, 0) + 1
                if is_right is not True:
                    self.wrong.append((known.model, dict(known.body), is_right))

    def _ask(self, known: Known, *, streams: bool) -> Any:
        """Return True if the answer is right, or else the answer."""
        body = dict(known.body) | {"model": known.model}
        embeds = known.path == "/v1/embeddings"
        if streams and not embeds:
            body["stream"] = True
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONGEST_S)
        connection.request("POST", known.path, json.dumps(body).encode())
        answer = connection.getresponse()
        content = answer.read().decode()
        connection.close()
        if answer.status != 200:
            return answer.status, content
        if embeds:
            data = base64.b64decode(json.loads(content)["data"][0]["embedding"])
            vector = np.frombuffer(data, "<f4")
            return min(nmse(vector, expected) for expected in known.answers) < 1e-9 or "another vector"
        if "stream" in body:
            lines = [json.loads(line[6:]) for line in content.splitlines() if line.startswith("data: {")]
            if errors := [line for line in lines if "error" in line]:
                return errors
            text = "".join(line["choices"][0]["text"] for line in lines)
        else:
            text = json.loads(content)["choices"][0]["text"]
        return text in known.answers or text


def tree_of(pid: int) -> list[int]:
    pids = [pid]
    for known in pids:
        for task in Path(f"/proc/{known}/task").glob("*/children"):
            pids += [int(word) for word in task.read_text(encoding="utf-8").split() if int(word) not in pids]
    return pids


def resident_nbytes(pid: int) -> int:
    """Return the resident memory of a process and its descendants, without pages that they share."""
    total = 0
    for each in tree_of(pid):
        try:
            lines = Path(f"/proc/{each}/smaps_rollup").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total
