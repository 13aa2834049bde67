"""Random bodies and random HTTP for a server."""

from __future__ import annotations

import http.client
import json
import random
from contextlib import ExitStack
from pathlib import Path

from serving import HANG_S, Address, Command, FakeModel, served

from fuzz.bodies import BODIES, body_of
from fuzz.damage import damaged
from fuzz.kind import Wrong
from vkbackend.tools.server.front import Config
from vkbackend.tools.server.limits import Limits

# ---- bodies ----


def body_command(folder: Path) -> Command:
    """Start a server with all endpoints. One slot may be saved to `folder`."""
    command = Command(
        "--metrics", "-np", "2", "-c", "128", "-n", "1", "--slot-save-path", str(folder), "--log-disable"
    )
    assert command.address.post("/completion", {"prompt": "Once", "id_slot": 0})[0] == 200
    return command


def is_idle(address: Address) -> bool:
    return (
        address.get("/health")[0] == 200
        and "llamacpp:requests_processing 0" in address.get("/metrics")[1]
        and not any(slot["is_processing"] for slot in address.get("/slots")[1])
    )


class Client:
    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)

    def status(self, path: str, body: bytes) -> int:
        """Return the answer's status. Raises Wrong if the server must not send this answer to any body."""
        return self.answer(path, body)[0]

    def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        try:
            self._connection.request("POST", path, body)
            answer = self._connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Wrong(f"{path} no answer: {type(error).__name__}") from None
        if answer.status not in (200, 400, 404, 501):
            raise Wrong(f"{path} status {answer.status}: {text[:300]!r}")
        if answer.status != 200:
            if not json.loads(text)["error"]["message"]:
                raise Wrong(f"{path} an error without a message")
        elif b'"error":' in text and b'"error":null' not in text:
            raise Wrong(f"{path} status 200 with an error: {text[:300]!r}")
        return answer.status, text

    def close(self) -> None:
        self._connection.close()


class Bodies:
    """A case is a path, a line break, and a body. The server runs a real engine."""

    deadline_s = 60.0

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._client: Client | None = None

    def make(self, rng: random.Random) -> bytes:
        path = rng.choice(list(BODIES))
        return path.encode() + b"\n" + body_of(rng, BODIES[path])

    def check(self, case: bytes) -> str:
        if self._client is None:
            self._client = Client(body_command(self._folder).address.port)
        path, _, body = case.partition(b"\n")
        if path.decode(errors="replace") not in BODIES:
            return "no case"
        return "accepted" if self._client.status(path.decode(), body) == 200 else "refused"


# ---- headers ----

HEADERS = (
    b"Host: localhost", b"Content-Type: application/json", b"Accept: */*", b"Connection: keep-alive",
    b"Origin: http://localhost", b"Authorization: Bearer x", b"Expect: 100-continue",
)  # fmt: skip
PIECES = (
    b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\0", b": ", b" ", b"Transfer-Encoding: chunked\r\n",
    b"Content-Length: 5\r\n",
    b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\n", b"Host: evil.example\r\n",
    b"Origin: http://evil.example\r\n",
    b"HTTP/1.0", b"HTTP/2.0", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"%00", b"%2e%2e%2f",
    b"/../../etc/passwd", b"//", b"?",
    b"\xff\xfe", b"\xc3\xa9", b"x" * 40_000, b"ffffffffffffffff\r\n", b"0\r\n\r\n", b"\t",
    b"X: " + b"y" * 33_000,
    b"Cookie: a=b\r\n" * 200, b"Range: bytes=0-,0-,0-\r\n", b"Accept-Encoding: gzip;q=\r\n",
    b"Authorization: Basic \xff\r\n",
)  # fmt: skip
METHODS = (
    b"GET",
    b"POST",
    b"POST",
    b"OPTIONS",
    b"HEAD",
    b"PUT",
    b"DELETE",
    b"BREW",
    b"CONNECT",
    b"TRACE",
    b"get",
)
PATHS = (
    b"/health", b"/v1/models", b"/v1/completions", b"/props", b"/metrics", b"/slots", b"/", b"/page.js",
    b"/tokenize",
    b"/stats", b"/slots/0?action=save", b"*", b"http://a.example/health", b"/v1/models/x", b"/%",
    b"/lora-adapters",
)  # fmt: skip
BODY = b'{"prompt":"a","content":"a","max_tokens":1}'
WAIT_S = 0.1  # The server waits this long for the remaining bytes of a request.


class Headers:
    """A case is random bytes. The client sends them, then a valid request, and reads until the server closes
    the connection."""

    deadline_s = 60.0

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._address: Address | None = None

    def make(self, rng: random.Random) -> bytes:
        lines = [b" ".join((rng.choice(METHODS), rng.choice(PATHS), b"HTTP/1.1"))]
        lines += [HEADERS[0], *rng.sample(HEADERS[1:], rng.randrange(4))]
        body = rng.choice((b"", BODY))
        if body and rng.random() < 0.3:
            lines.append(b"Transfer-Encoding: chunked")
            body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        elif body:
            lines.append(b"Content-Length: %d" % len(body))
        raw = b"\r\n".join(lines) + b"\r\n\r\n" + body
        return raw if rng.random() < 0.1 else damaged(rng, raw, PIECES)

    def check(self, case: bytes) -> str:
        if self._address is None:
            limits = Limits(header_s=WAIT_S, body_s=WAIT_S, idle_s=WAIT_S)
            config = Config("fake.gguf", "fake", limits=limits, logs_requests=False, shows_metrics=True)
            self._address = self._stack.enter_context(served(FakeModel(), config))
        answer = b""
        with self._address.connect() as sock:
            try:
                sock.sendall(case)
                sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                while piece := sock.recv(1 << 16):
                    answer += piece
            except TimeoutError:
                raise Wrong("the connection stayed open") from None
            except (ConnectionResetError, BrokenPipeError):
                pass
        statuses = statuses_of(answer)
        if bad := [status for status in statuses if status >= 500 and status not in (501, 505)]:
            raise Wrong(f"status {bad[0]}: {answer[:300]!r}")
        status, health, _ = self._address.get("/health")
        if status != 200:
            raise Wrong(f"the next client got {status}: {health}")
        return "refused" if not statuses or max(statuses) >= 400 else "accepted"

    def close(self) -> None:
        self._stack.close()


def statuses_of(answer: bytes) -> list[int]:
    lines = [line for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    if answer and not answer.startswith(b"HTTP/1.1 "):
        raise Wrong(f"the answer is not HTTP: {answer[:100]!r}")
    return [int(line.split()[1]) for line in lines]
