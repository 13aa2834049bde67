"""A program on node 0 that uses a group of nodes and prints JSON lines. The program waits for a line on stdin
before it may be interrupted."""

from __future__ import annotations

import json
import sys
import time
from typing import Any
from unittest.mock import patch

from vkbackend import LLM
from vkbackend.errors import VkbackendError
from vkbackend.models.options import Options

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def main() -> None:
    wanted = json.loads(sys.argv[1])
    options, prompt = wanted["options"], wanted["prompt"]

    def tokens(llm: LLM, n: int) -> list[int]:
        return llm.generate(prompt, max_tokens=n, **GREEDY).tokens

    def shared(llm: LLM, prompt: list[int]) -> tuple[Any, ...]:
        llm.generate(prompt, max_tokens=2, slot=0, **GREEDY)
        more = llm.generate([*prompt, 5], max_tokens=4, slot=1, **GREEDY)
        return llm.logits(prompt).tobytes(), more.tokens, more.timings["prompt_n"]

    if wanted["when"] == "equal":
        for model in wanted["models"]:
            with LLM(model["path"], hostfile=model["hostfile"], **options | model.get("options", {})) as llm:
                names, group = llm.device_names, llm.logits(prompt)
                llm.generate(prompt, max_tokens=2, slot=0, **GREEDY)
                llm.save_state(model["state"], 0)
                reported = [row["device"] for row in llm.memory()]
                long = shared(llm, model["long"]) if model["long"] else None
            # with -sm hosts, the split depends on `hosts`
            with patch.object(Options, "nodes", tuple(model["places"])):
                alone = LLM(model["path"], devices=model["devices"], **options | model.get("options", {}))
            with alone as llm:
                same = bool((llm.logits(prompt) == group).all())
                want = tokens(llm, 8)
                loaded = llm.load_state(model["state"], 0)
                more = llm.generate(loaded, max_tokens=6, slot=0, **GREEDY).tokens
                same_long = not long or long == shared(llm, model["long"])
            computed = long and long[2]
            state = loaded + more == prompt + want
            say(same=same and same_long, state=state, computed=computed, devices=names, told=reported)
        return

    if wanted["when"] == "image":
        given = {"prompt_string": "Once <__media__> upon", "multimodal_data": [wanted["image"]]}
        answers = []
        for where in ({"hostfile": wanted["hostfile"]}, {"devices": ["numpy"]}):
            with LLM(wanted["path"], mmproj=wanted["mmproj"], **options, **where) as llm:
                answers += [llm.generate(given, max_tokens=8, **GREEDY) for _ in range(2)]
        rows = [sum(token < 0 for token in answer.prompt_tokens) for answer in answers]
        kept = [answer.timings["image_cache_n"] for answer in answers]
        say(tokens=[answer.tokens for answer in answers], rows=rows, kept=kept)
        return

    began = time.monotonic()
    try:
        if wanted["when"] == "load":
            say(at="load")
        with LLM(wanted["path"], hostfile=wanted["hostfile"], **options) as llm:
            say(at="open", tokens=tokens(llm, 8))
            if wanted["when"] == "idle":
                say(at="idle")
                sys.stdin.readline()
            began = time.monotonic()
            if wanted["when"] == "step":
                say(at="step")
            while True:
                tokens(llm, 64)
    except VkbackendError as error:
        say(error=type(error).__name__, words=str(error), seconds=time.monotonic() - began)
    sys.stdin.readline()
    with LLM(wanted["path"], hostfile=wanted["again"], **options) as llm:
        say(again=tokens(llm, 8))


if __name__ == "__main__":
    main()
