"""The page's files, which are read once. Requests can name only keys of FILES."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from vkbackend.tools.server.front import Front

FOLDER = Path(__file__).parent / "page"
# Python's `mimetypes` depends on the system, and browsers do not run JavaScript of type text/plain.
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
CSP = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def path_of(file: Path) -> str:
    return "/" if file.name == "index.html" else f"/page/{file.relative_to(FOLDER).as_posix()}"


FILES = {path_of(file): file for file in sorted(FOLDER.rglob("*")) if file.suffix in TYPES}
FILES["/index.html"] = FILES["/"]
CONTENTS = {path: file.read_bytes() for path, file in FILES.items()}
TAGS = {path: f'"{hashlib.sha256(content).hexdigest()[:32]}"' for path, content in CONTENTS.items()}


async def page(service: Front, request: Request) -> Response:
    """Browsers revalidate each file, so they never mix versions."""
    path = request.scope["path"]
    headers = {"cache-control": "no-cache", "etag": TAGS[path]}
    if request.headers.get("if-none-match") == TAGS[path]:
        return Response(status_code=304, headers=headers)
    return Response(CONTENTS[path], headers=headers, media_type=TYPES[FILES[path].suffix])
