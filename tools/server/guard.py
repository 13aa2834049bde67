"""Check the host name, the origin and the API key of a request before its body is read."""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from vkbackend.errors import InvalidArgument
from vkbackend.paths import quoted, why
from vkbackend.tools.server.failures import Refusal

PUBLIC = ("/health",)  # this endpoint reveals no data of requests
MAX_KEYS, MAX_KEY_LENGTH = 1024, 4096
CORS_HEADERS = b"authorization, content-type, x-api-key, anthropic-version, anthropic-beta"
CORS_AGE_S = b"600"
HEADER_NAMES = re.compile(rb"[A-Za-z0-9-]{1,64}( ?, ?[A-Za-z0-9-]{1,64}){0,31}")


def normal_path(path: str) -> str:
    """Remove /v1 and doubled slashes from the path, because some clients send them."""
    path = re.sub("/{2,}", "/", path)
    if path == "/v1" or path.startswith("/v1/"):
        path = path[3:]
    return path.rstrip("/") or "/"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def read_keys(keys: Iterable[str], path: str | None) -> tuple[str, ...]:
    """Return `keys` and the keys in the file, one per line. Raises InvalidArgument."""
    all_keys = [key for text in keys for key in text.split(",")]
    if path is not None:
        try:
            lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                f"the file of API keys {quoted(path)} cannot be read: {why(error)}; give a UTF-8 text"
            ) from None
        all_keys += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if (keys or path is not None) and not any(all_keys):
        raise InvalidArgument("no API key was given; a key needs at least one character")
    for key in all_keys:
        if not key or len(key) > MAX_KEY_LENGTH or not key.isprintable() or not key.isascii():
            raise InvalidArgument(
                f"an API key must have 1..{MAX_KEY_LENGTH} printable ASCII characters; a header carries it"
            )
    if len(all_keys) > MAX_KEYS:
        raise InvalidArgument(f"{len(all_keys)} API keys were given, at most {MAX_KEYS} are allowed")
    return tuple(all_keys)


def _host_of_origin(origin: str) -> str:
    with suppress(ValueError):
        return urlsplit(origin).hostname or ""
    return ""


def default_origins(keys: Iterable[str]) -> tuple[str, ...]:
    """Return the default of allowed origins. If keys are set, all pages may send requests, as in
    llama-server, because requests need a key. Without keys, only pages of this machine may send requests."""
    return ("*",) if any(keys) else ("localhost",)


@dataclass(frozen=True, slots=True)
class Guard:
    """Addresses, localhost, the machine's name and `hosts` are allowed. `origins` are allowed origins of
    pages; "*" allows all."""

    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    methods: str = "GET, POST, DELETE, OPTIONS"
    headers: str = "*"  # the names of headers that a page wants to send
    credentials: bool = False

    def check(self, path: str, method: str, headers: Mapping[bytes, bytes], public: bool) -> None:
        """Raises Refusal."""
        self._check_host(headers)
        self._check_origin(headers)
        if method != "OPTIONS" and path not in PUBLIC and not public:
            self._check_key(headers)

    # ---- Host and Origin ----

    def _check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse unknown host names, because any site can point its name at this address (DNS rebinding)."""
        given = headers.get(b"host")
        if given is None:
            return  # browsers always send Host
        name = host_of(given)
        if name is None or not (_is_address(name) or name in self._names()):
            raise Refusal(
                403,
                f"this server is not known as {_shown(given)}; start it with --allowed-host NAME to allow it",
            )

    def _names(self) -> set[str]:
        return {"localhost", socket.gethostname().lower(), *(host.lower() for host in self.hosts)}

    def _check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        origin = headers.get(b"origin")
        if origin is None or self.allows(origin) or _is_same(origin, headers.get(b"host")):
            return
        raise Refusal(
            403,
            f"pages of {_shown(origin)} may not use this server; start it with --cors-origins ORIGIN to "
            "allow them",
        )

    def allows(self, origin: bytes) -> bool:
        text = origin.decode("latin-1")
        if "*" in self.origins or text in self.origins:
            return True
        return "localhost" in self.origins and is_loopback(_host_of_origin(text))

    def cors(self, headers: Mapping[bytes, bytes], method: str) -> list[tuple[bytes, bytes]]:
        origin = headers.get(b"origin")
        if origin is None or not self.allows(origin):
            return []
        extra = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        if self.credentials:
            extra.append((b"access-control-allow-credentials", b"true"))
        if method == "OPTIONS":
            extra += [
                (b"access-control-allow-methods", self.methods.encode()),
                (b"access-control-allow-headers", self._allowed_headers(headers)),
                (b"access-control-max-age", CORS_AGE_S),
            ]
        return extra

    def _allowed_headers(self, headers: Mapping[bytes, bytes]) -> bytes:
        """Return the allowed headers. Browsers do not apply "*" to `authorization`, so the names that the
        page asks for replace "*"."""
        if self.headers != "*":
            return self.headers.encode()
        asked = headers.get(b"access-control-request-headers", b"")
        return asked if HEADER_NAMES.fullmatch(asked) else CORS_HEADERS

    # ---- keys ----

    def _check_key(self, headers: Mapping[bytes, bytes]) -> None:
        """Compare the request's key with all keys in constant time."""
        if not self.keys:
            return
        given = headers.get(b"x-api-key", b"")
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer":
            given = token.strip()
        good = [hmac.compare_digest(given, key.encode()) for key in self.keys]
        if not any(good):
            raise Refusal(
                401,
                "the API key is missing or wrong; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="invalid_api_key",
            )


def host_of(header: bytes) -> str | None:
    """Return the host without its port, or None if the header is invalid."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?", header.decode("latin-1"))
    return match[1].strip("[]").lower().rstrip(".") if match else None


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False


def _is_same(origin: bytes, host: bytes | None) -> bool:
    """Return whether a page has the server's origin. Proxies may have changed the scheme."""
    with suppress(ValueError):
        parts = urlsplit(origin.decode("latin-1"))
        if host is not None and parts.scheme in ("http", "https"):
            netloc, given = parts.netloc.lower(), host.decode("latin-1").lower()
            default = ":443" if parts.scheme == "https" else ":80"
            return netloc.removesuffix(default) == given.removesuffix(default)
    return False


def _shown(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))
