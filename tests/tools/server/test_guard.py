from __future__ import annotations

import hmac
import logging
from pathlib import Path

import pytest
from serving import FakeModel, served

from vkbackend.errors import InvalidArgument
from vkbackend.tools.server import guard as guard_module
from vkbackend.tools.server.front import Config
from vkbackend.tools.server.guard import Guard, host_of, is_loopback, normal_path, read_keys
from vkbackend.tools.server.native import slot_file

pytestmark = pytest.mark.no_vulkan

KEYS = ("first-key", "second-key")


def config(**options: object) -> Config:
    return Config("fake.gguf", "fake", guard=Guard(**options), slot_folder="/nowhere")  # type: ignore[arg-type]


# ---- keys ----


def test_keys() -> None:
    with served(FakeModel(), config(keys=KEYS)) as address:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"x-api-key": ""},
            {"Authorization": "first-key"},
        ):
            status, answer, sent = address.get("/v1/models", **headers)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
            assert sent["www-authenticate"] == "Bearer"
        for key in KEYS:
            assert address.get("/v1/models", Authorization=f"Bearer {key}")[0] == 200
            assert address.get("/v1/models", Authorization=f"bearer {key}")[0] == 200
            assert address.get("/v1/models", **{"x-api-key": key})[0] == 200
        for path in ("/models", "/props", "/slots", "/metrics", "/stats", "//v1//metrics", "/metrics/"):
            assert address.get(path)[0] == 401, path
        for path in ("/completions", "/v1/completion", "/tokenize", "/slots/0?action=save"):
            assert address.post(path, {})[0] == 401, path
        assert address.get("/v1/health")[0] == 200  # monitoring has no key


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """compare_digest compares the request's key with every valid key, even after a match."""
    compared, digest = [], hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(b)
        return digest(a, b)

    monkeypatch.setattr(guard_module.hmac, "compare_digest", compare)
    with served(FakeModel(), config(keys=KEYS)) as address:
        assert address.get("/models", Authorization="Bearer first-key")[0] == 200
    assert compared == [b"first-key", b"second-key"]


def test_files_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\none\n\n two \n", encoding="utf-8")
    assert read_keys(["three,four"], str(file)) == ("three", "four", "one", "two")
    assert read_keys([], None) == ()
    file.write_text("# none\n", encoding="utf-8")
    for given, path in (
        ([], str(file)),
        ([], str(tmp_path / "no")),
        ([""], None),
        (["a\nb"], None),
        (["ä"], None),
    ):
        with pytest.raises(InvalidArgument):
            read_keys(given, path)


# ---- Host and Origin ----


@pytest.mark.parametrize("host,status", [
    ("localhost", 200), ("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("10.0.0.7:8080", 200),
    ("LOCALHOST.", 200), ("known.example:80", 200), ("evil.example", 403), ("localhost.evil.example", 403),
    ("localhost@evil.example", 403), ("", 403), ("127.0.0.1.evil.example", 403), ("a b", 403),
])  # fmt: skip
def test_names_of_the_server(host: str, status: int) -> None:
    """After DNS rebinding, a hostile page sends its own host name to the server."""
    guard = Guard(hosts=("known.example",))
    from vkbackend.tools.server.failures import Refusal

    try:
        guard.check("/health", "GET", {b"host": host.encode()}, False)
        result = 200
    except Refusal as refusal:
        result = refusal.status
    assert result == status


def test_host_is_checked_on_the_wire() -> None:
    with served(FakeModel(), config()) as address:
        assert address.get("/health", Host="evil.example")[0] == 403
        assert address.post("/completions", {"prompt": "a"}, Host="evil.example")[0] == 403
        with address.connect() as sock:  # HAProxy's health checks send HTTP/1.0 without a Host header
            sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_origins() -> None:
    with served(FakeModel(), config(origins=("https://known.example",))) as address:
        same = f"http://127.0.0.1:{address.port}"
        assert address.get("/models", Origin=same)[0] == 200
        for origin in (
            "https://evil.example",
            "null",
            "http://known.example",
            f"http://127.0.0.1:{address.port + 1}",
        ):
            status, _, headers = address.get("/models", Origin=origin)
            assert status == 403 and "access-control-allow-origin" not in headers
        status, _, headers = address.get("/models", Origin="https://known.example")
        assert status == 200 and headers["access-control-allow-origin"] == "https://known.example"
        status, _, headers = address.request(
            "OPTIONS", "/completions", headers={"Origin": "https://known.example"}
        )
        assert status == 204 and "authorization" in headers["access-control-allow-headers"]


def test_no_cors_unless_asked() -> None:
    with served(FakeModel(), config()) as address:
        for method in ("GET", "OPTIONS"):
            status, _, headers = address.request(method, "/models", headers={"Origin": "https://a.example"})
            assert status == 403
            assert not [name for name in headers if name.startswith("access-control")]
        assert not [name for name in address.get("/models")[2] if name.startswith("access-control")]


def test_any_origin_is_allowed_by_a_star() -> None:
    with served(FakeModel(), config(origins=("*",))) as address:
        headers = address.get("/models", Origin="null")[2]
        assert headers["access-control-allow-origin"] == "null"
        assert "access-control-allow-credentials" not in headers


def test_localhost_stands_for_the_pages_of_this_machine() -> None:
    guard = Guard(origins=("localhost",))
    for origin in (b"http://localhost:3000", b"https://127.0.0.1", b"http://[::1]:80"):
        assert guard.allows(origin)
    for origin in (b"http://localhost.evil.example", b"null", b"http://[", b"https://10.0.0.1"):
        assert not guard.allows(origin)


@pytest.mark.parametrize("header,name", [
    (b"a.example:80", "a.example"), (b"[::1]", "::1"), (b"a/b", None), (b"a:b", None), (b"\xff", None),
])  # fmt: skip
def test_host_of(header: bytes, name: str | None) -> None:
    assert host_of(header) == name


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost", "127.8.8.8")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.com", "")))


# ---- paths ----


@pytest.mark.parametrize("path,normal", [
    ("/v1/models", "/models"), ("/v1//models", "/models"), ("//models/", "/models"), ("/", "/"), ("/v1", "/"),
    ("/v10/models", "/v10/models"), ("//v1///chat//completions", "/chat/completions"),
])  # fmt: skip
def test_paths(path: str, normal: str) -> None:
    assert normal_path(path) == normal


def test_routes_with_and_without_a_version() -> None:
    with served(FakeModel()) as address:
        for path in ("/models", "/v1/models", "/v1//models", "//models/", "/v1/models/fake", "/models?a=b"):
            assert address.get(path)[0] == 200, path
        status, answer, _ = address.get("/v1/nothing")
        assert status == 404 and answer["error"]["type"] == "not_found_error"
        assert address.get("/v1/models/other")[0] == 404
        assert address.post("/health", {})[0] == 405
        assert address.get("/completions")[0] == 405
        assert address.post("/v1/messages/none", {})[1]["type"] == "error"


BAD_NAMES = [
    "",
    ".",
    "..",
    "a/b",
    "/etc/passwd",
    "../a",
    "a\\b",
    ".hidden",
    "a\0",
    "a\n",
    "ä",
    "a" * 201,
    "-rf",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_slot_files_are_in_one_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="filename"):
        slot_file(str(tmp_path), name)


def test_slot_files_do_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(InvalidArgument, match="link"):
        slot_file(str(tmp_path), "link")
    assert slot_file(str(tmp_path), "a.bin") == str(tmp_path / "a.bin")


# ---- logs ----


def test_logs_contain_neither_contents_nor_keys(caplog: pytest.LogCaptureFixture) -> None:
    model = FakeModel()
    model.fails = lambda n: ValueError("prompt-text") if n == 2 else None
    with caplog.at_level(logging.DEBUG), served(model, config(keys=KEYS)) as address:
        key = {"Authorization": "Bearer first-key"}
        address.post("/completions?prompt-text", {"prompt": "prompt-text", "max_tokens": 1}, **key)
        assert address.post("/completions", {"prompt": "prompt-text", "max_tokens": 5}, **key)[0] == 500
        address.post("/completions", b'{"prompt-text', **key)
        address.get("/prompt-text", **key)
        address.get("/models", Authorization="Bearer prompt-text")
        with address.connect() as sock:
            sock.sendall(b"prompt-text first-key\r\n\r\n")
            sock.recv(1000)
    # the log contains a refused request's path, which helps to find the client
    assert "GET /models 401" in caplog.text
    assert "POST /completions 200" in caplog.text and "ValueError" in caplog.text
    assert "GET /models 401" in caplog.text and "GET unknown 404" in caplog.text
    assert "prompt-text" not in caplog.text and "-key" not in caplog.text


def test_headers_of_every_answer() -> None:
    with served(FakeModel()) as address:
        for path in ("/models", "/nothing"):
            headers = address.get(path)[2]
            assert headers["x-content-type-options"] == "nosniff"
            assert "server" not in headers
        assert "script-src 'self'" in address.get("/")[2]["content-security-policy"]
