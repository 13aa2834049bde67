"""A fake Hugging Face Hub with a repository, me/demo."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from places import ROOT

DEMO = (ROOT / "models" / "demo" / "demo.gguf").read_bytes()
PARTS = [f"demo-Q4_K_M-0000{i}-of-00002.gguf" for i in (1, 2)]
FILES = {"demo-Q8_0.gguf": DEMO, **dict.fromkeys(PARTS, b"part")}
COMMIT = "c" * 40
SECRET = "hf_secretsecretsecret"


class Hub(BaseHTTPRequestHandler):
    """`cut` ends the next answer after this many bytes. If `gate` is set, a download stops in the middle of a
    file until the gate opens."""

    asked: list[str] = []  # noqa: RUF012
    cut = 0
    gate: threading.Event | None = None

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, body: bool = True) -> None:
        path = self.path.partition("?")[0]
        Hub.asked.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        if path.startswith("/api/models/me/demo/tree/"):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in FILES.items()]  # fmt: skip
            return self.answer(json.dumps(tree).encode(), {"Content-Type": "application/json"})
        if path.startswith("/api/models/me/demo"):
            files = [{"rfilename": name} for name in FILES]
            return self.answer(json.dumps({"id": "me/demo", "sha": COMMIT, "siblings": files}).encode(), {})
        name = path.rpartition("/")[2]
        if path.startswith("/me/demo/resolve/") and name in FILES:
            data = FILES[name]
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            if (span := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))) and body:
                start = int(span[1])
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
                return self.answer(data[start:], headers, 206)
            return self.answer(data if body else b"", {**headers, "Content-Length": str(len(data))})
        self.answer(b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, 404)

    def answer(self, data: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        n, Hub.cut = (Hub.cut, 0) if Hub.cut and len(data) > Hub.cut else (len(data), Hub.cut)
        if Hub.gate is not None and n > 1000:
            self.wfile.write(data[: n // 2])
            self.wfile.flush()
            Hub.gate.wait(60)
            data = data[n // 2 :]
            n -= n // 2
        self.wfile.write(data[:n])
        if n < len(data):
            self.wfile.flush()
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def fake_hub(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the environment of processes that use this Hub, with a cache in `folder`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Hub.asked.clear()
    here = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(folder)}
    quiet = {"HF_TOKEN": SECRET, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*", "no_proxy": "*"}
    yield {**os.environ, **here, **quiet}
    server.shutdown()
    server.server_close()
