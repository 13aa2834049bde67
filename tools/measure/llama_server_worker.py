"""Runs llama-server in a separate process for `studies.serving_beside`. The command is `python FILE MODEL
SLOTS`. Needs xllamacpp.

The first line of output is the server's address. Each line of input is a JSON list of requests. The process
calls the server without HTTP, in one thread per request. The process writes the seconds until all requests
are answered.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any


def main() -> None:
    import xllamacpp  # type: ignore[import-not-found]

    n_slots = int(sys.argv[2])
    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel, params.n_ctx = sys.argv[1], n_slots, 512 * n_slots
    params.n_gpu_layers, params.port, params.kv_unified, params.verbosity = 0, 0, True, 0
    server: Any = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    for line in sys.stdin:
        threads = [threading.Thread(target=server.handle_completions, args=(r,)) for r in json.loads(line)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()
