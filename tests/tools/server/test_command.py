from __future__ import annotations

import argparse
import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from device_sets import wide
from serving import HANG_S, FakeModel, served, until

from vkbackend.errors import InvalidArgument
from vkbackend.tools import serve
from vkbackend.tools.cli import main
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.server.front import Config
from vkbackend.tools.server.model import Model
from vkbackend.tools.server.run import Server
from vkbackend.tools.server.service import Service
from vkbackend.tools.server.sockets import address_of, close, listen, listen_at

pytestmark = pytest.mark.no_vulkan


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    "missing", ["uvicorn", *(wide(pytest.param(name)) for name in ("starlette", "httptools", "msgspec"))]
)
def test_without_the_extra(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from vkbackend.tools.cli import main\nsys.exit(main(['serve', '-dev', 'numpy']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", timeout=60
    )
    assert done.returncode == 2
    assert "vkbackend[serve]" in done.stderr and "tools/setup.sh --serve" in done.stderr


def test_the_context_is_shared() -> None:
    args = parsed("-c", "300", "-np", "3")
    serve.share_context(args, demo_model())
    assert (args.n_ctx, args.kv_cells, args.n_slots) == (300, 300, 3)
    for words in ((), ("-c", "0")):
        args = parsed(*words)
        serve.share_context(args, demo_model())
        assert (args.n_ctx, args.kv_cells) == (512, 512)  # the demo model has a context of 512
    args = parsed("-c", "300", "--kv-cells", "900")
    serve.share_context(args, demo_model())
    assert args.kv_cells == 900


def test_defaults_of_sampling() -> None:
    assert serve.defaults_of(parsed()) == {}
    defaults = serve.defaults_of(parsed("--temp", "0.2", "--seed", "7", "-r", "END", "--ignore-eos"))
    assert defaults == {"temperature": 0.2, "seed": 7, "stop": ["END"], "ignore_eos": True}
    config = Config("a", "a", defaults=defaults, logs_requests=False)
    with served(FakeModel(), config) as address:
        params = address.get("/props")[1]["default_generation_settings"]["params"]
        assert params["temperature"] == 0.2 and params["top_k"] == 40


def test_names_tags_and_no_page() -> None:
    words = (
        "-a",
        "a, b",
        "--tags",
        "x,y",
        "--no-ui",
        "--reasoning-format",
        "none",
        "--sse-ping-interval",
        "3",
    )
    config = serve.config_of(
        parsed(*words, "--log-disable", "--cors-origins", "localhost,http://a"), "m.gguf"
    )
    assert (config.reasoning_format, config.limits.ping_s) == ("none", 3.0)
    assert config.guard.origins == ("localhost", "http://a")
    with served(FakeModel(), config) as address:
        [entry] = address.get("/v1/models")[1]["data"]
        assert (entry["id"], entry["aliases"], entry["tags"]) == ("a", ["a", "b"], ["x", "y"])
        assert address.get("/v1/models/b")[0] == 200 and address.get("/v1/models/c")[0] == 404
        assert address.get("/")[0] == 404
    with pytest.raises(InvalidArgument, match="--sse-ping-interval"):
        serve.config_of(parsed("--sse-ping-interval", "0"), "a.gguf")


def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(serve.KEY_VARIABLE, "secret")
    args = parsed("--host", "0.0.0.0")
    assert serve.config_of(args, "a.gguf").guard.keys == ("secret",)
    monkeypatch.delenv(serve.KEY_VARIABLE)
    with pytest.raises(InvalidArgument, match="--insecure"):
        serve.config_of(args, "a.gguf")
    assert serve.config_of(parsed("--host", "0.0.0.0", "--insecure"), "a.gguf").alias == "a"


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0) as sock:
        port = str(sock.getsockname()[1])
        assert main(["serve", "-dev", "numpy", "--port", port]) == 2
    assert "--port" in capsys.readouterr().err


def test_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert,
         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    sock = listen("127.0.0.1", 0)
    open_: Any = lambda progress: FakeModel()  # noqa: E731
    server = Server(Service(Config("a", "a"), Model(open_)), key_file=str(key), cert_file=str(cert))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    context = ssl.create_default_context(cafile=str(cert))
    url = f"https://127.0.0.1:{sock.getsockname()[1]}/v1/models"

    def ready() -> bool:
        try:
            with urllib.request.urlopen(url, context=context, timeout=HANG_S) as answer:
                return bool(json.load(answer)["data"][0]["id"] == "a")
        except OSError:
            return False

    until(ready)
    server.should_exit = True
    thread.join(HANG_S)


def test_flags_of_llama_server(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "slots"
    words = (
        "--host", "127.0.0.1,::1", "--host", "127.0.0.1", "--metrics", "--props", "--timeout", "7",
        "--slot-save-path", str(folder), "--cors-methods", "GET", "--cors-headers", "x-own",
        "--cors-credentials", "--no-prefill-assistant", "--sse-ping-interval", "-1",
    )  # fmt: skip
    args = parsed(*words)
    config = serve.config_of(args, "m.gguf")
    assert serve.hosts_of(args) == ("127.0.0.1", "::1") and folder.is_dir()
    assert config.shows_metrics and config.takes_props and not config.prefills and not config.is_verbose
    assert (config.limits.body_s, config.limits.drain_s, config.limits.header_s) == (7, 7, 10)
    assert config.guard.origins == ("localhost",) and config.guard.credentials
    asked = config.guard.cors({b"origin": b"http://localhost:5173"}, "OPTIONS")
    assert (b"access-control-allow-methods", b"GET") in asked
    assert (b"access-control-allow-headers", b"x-own") in asked
    assert serve.config_of(parsed("--api-key", "a"), "m.gguf").guard.origins == ("*",)
    for bad in (["--host", ","], ["--timeout", "0"], ["--cors-methods", "GET\n"],
                ["--host", "127.0.0.1,0.0.0.0"]):  # fmt: skip
        with pytest.raises(InvalidArgument, match=r"--|timeout"):
            serve.config_of(parsed(*bad), "m.gguf")


def test_a_unix_socket(tmp_path: Path) -> None:
    """--host FILE.sock. A socket file that no process serves is replaced; other files are kept."""
    path = str(tmp_path / "a.sock")
    for config in (serve.config_of(parsed("--host", path), "m.gguf"), Config("fake.gguf", "fake")):
        open_: Any = lambda progress: FakeModel()  # noqa: E731
        server = Server(Service(config, Model(open_)), key_file=None, cert_file=None)
        sock = listen(path, 0)
        assert address_of(sock, tls=False) == f"unix:{path}"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        until(lambda: b"200 OK" in health_at(path))
        with pytest.raises(InvalidArgument, match="cannot listen"):
            listen(path, 0)  # a server uses it
        server.should_exit = True
        thread.join(HANG_S)
    assert Path(path).exists()  # as after a crash
    again = listen(path, 0)
    close(again)
    assert not Path(path).exists()
    Path(path).write_text("x", encoding="utf-8")
    with pytest.raises(InvalidArgument, match="cannot listen"):
        listen(path, 0)
    assert Path(path).read_text(encoding="utf-8") == "x"


def health_at(path: str) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(HANG_S)
        sock.connect(path)
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return b"".join(iter(lambda: sock.recv(4096), b""))


def test_several_addresses() -> None:
    with pytest.raises(InvalidArgument, match="--port 0"):
        listen_at(("127.0.0.1", "127.0.0.2"), 0)
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidArgument, match="cannot listen"):
            listen_at(("127.0.0.2", "127.0.0.1"), port)
        for sock in listen_at(("127.0.0.2", "127.0.0.3"), port):
            sock.close()
