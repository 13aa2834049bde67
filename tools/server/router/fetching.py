"""A process that downloads a model, so that a download can be cancelled. The process prints JSON lines:
`file`, `done` and `total` in bytes, then `path`, or `error`."""

from __future__ import annotations

import json
import os
import sys
import threading

from vkbackend.errors import InvalidArgument, VkbackendError
from vkbackend.models.hub import fetch, fetch_projector
from vkbackend.models.hub_cache import cache_folder


def show(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def end_with_server() -> None:
    """Wait for the end of stdin, whose other end the server holds. The server may have been killed."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def main() -> int:
    threading.Thread(target=end_with_server, daemon=True).start()
    shown: dict[str, int] = {}

    def progress(file: str, done: int, total: int) -> None:
        if shown.get(file) != done:  # The server ends downloads without progress.
            shown[file] = done
            show(file=file, done=done, total=total)

    try:
        path = fetch(sys.argv[1], progress=progress)
        fetch_projector(sys.argv[1], progress=progress)
        show(path=path)
    except VkbackendError as error:
        text = str(error)
        for folder in (cache_folder(), *cache_folder().parents[:-1]):  # Clients do not see folders.
            text = text.replace(str(folder), "the cache")
        show(error=text, is_wrong=isinstance(error, InvalidArgument))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
