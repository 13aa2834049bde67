from __future__ import annotations

import json

import pytest
from serving import FakeModel, served

from vkbackend.errors import InvalidArgument
from vkbackend.tools.cli import main
from vkbackend.tools.measure.http_load import Endpoint, Text, load_of

pytestmark = pytest.mark.no_vulkan


def test_clients_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    model = FakeModel(n_slots=4, n_ctx=2048)
    with served(model) as address:
        url = f"http://127.0.0.1:{address.port}/v1"
        words = ["bench-serve", "--url", url, "-np", "1,3", "-r", "2", "-n", "5", "-o", "jsonl"]
        assert main(words) == 0
    single, three = map(json.loads, capsys.readouterr().out.splitlines())
    assert (single["n"], single["n_texts"], three["n"], three["n_texts"]) == (1, 2, 3, 6)
    assert single["n_errors"] == three["n_errors"] == 0
    assert 0 < single["ttft_p50"] <= single["ttft_p99"] and single["tokens_per_s"] > 0
    assert model.begun == 1 + 2 + 6


def test_failures_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    model = FakeModel(n_ctx=2048)
    model.fails = lambda n: ValueError("a bug") if n == 3 else None
    with served(model) as address:
        url = f"http://127.0.0.1:{address.port}"
        assert main(["bench-serve", "--url", url, "-np", "2", "-r", "1", "-n", "5", "-o", "json"]) == 1
        out = json.loads(capsys.readouterr().out)
        assert out[0]["n_errors"] == 2 and out[0]["errors"]
        assert main(["bench-serve", "--url", f"{url}/none"]) == 2
    assert main(["bench-serve", "--url", f"http://127.0.0.1:{address.port}"]) == 2


def test_gaps_and_rates() -> None:
    texts = [Text(0.0, [1.0, 1.5, 2.5], 3), Text(0.0, [3.0, 3.5]), Text(0.0, error="HTTP 429")]
    load = load_of(3, texts, 2.0)
    assert (load.n_texts, load.n_errors, load.errors) == (3, 1, ("HTTP 429",))
    assert load.tokens_per_s == (3 + 2) / 2.0
    assert (load.ttft_p50, load.itl_p50, load.itl_p99) == (2000, 500, 1000)


@pytest.mark.parametrize("url", ["", "localhost:8080", "ftp://a", "http://", "http://a:b", "http://[::1"])
def test_addresses(url: str) -> None:
    with pytest.raises(InvalidArgument, match="url"):
        Endpoint.of(url)


def test_address_parts() -> None:
    assert Endpoint.of("https://a.example/v1/") == Endpoint("a.example", 443, "/v1", True)
    assert Endpoint.of("http://[::1]:8080") == Endpoint("::1", 8080, "", False)
