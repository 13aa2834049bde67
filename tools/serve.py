"""`vkbackend serve`: serve a model over HTTP.

The server provides OpenAI's API, Anthropic's messages, llama-server's endpoints and flags, and a page at /
(docs/serving.md). The server answers 503 until the model is loaded. After SIGTERM or Ctrl-C the server
finishes running answers; a second signal ends it immediately.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
import sys
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vkbackend.checks import whole_number
from vkbackend.errors import InvalidArgument, UnsupportedFeature
from vkbackend.meta.load import Progress
from vkbackend.models.arguments import token_limit
from vkbackend.models.llm import LLM
from vkbackend.models.options import Options
from vkbackend.paths import quoted, why
from vkbackend.tools.console import console, tell_notes
from vkbackend.tools.flags import runner
from vkbackend.tools.flags.llama_cpp import settle, settle_common
from vkbackend.tools.flags.options import fields_given, options_of
from vkbackend.tools.flags.pooling import add_pooling_arguments, check_pooling
from vkbackend.tools.flags.sampling import sampling_of
from vkbackend.tools.flags.server import KEY_VARIABLE, add_server_arguments
from vkbackend.tools.flags.structure import structure_given
from vkbackend.tools.flags.templates import add_template_arguments, template_of
from vkbackend.tools.flags.text import NO_MODEL, add_shared_arguments, demo_model, own_context

if TYPE_CHECKING:
    from rich.console import Console

    from vkbackend.tools.server.front import Config, Front
    from vkbackend.tools.server.router.registry import Entry

N_CTX, N_SLOTS = 8192, 4
HOSTS = ("127.0.0.1",)
# Only requests set these options.
NOT_DEFAULTS = ("seed", "logits_processors", "logprobs", "stop_token_ids")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-m", "--model", metavar="FILE", help="the model, a .gguf file (default: the embedded demo model)")
    add("-a", "--alias", metavar="NAME,...", type=names_of, default=(),
        help="the model's name in the API (default: its file's), and further names")  # fmt: skip
    add("--tags", metavar="TAG,...", type=names_of, default=(), help="tags that /v1/models shows")
    add("--host", action="append", metavar="ADDRESS,...", type=names_of,
        help="the addresses to listen at, or a file that ends in .sock for a Unix socket; may be repeated "
        "(default: 127.0.0.1)")  # fmt: skip
    add("--port", type=int, default=8080, metavar="N", help="the port; 0: any (default: %(default)s)")
    add("-np", "--parallel", dest="n_slots", type=int, default=N_SLOTS, metavar="N",
        help="sequences computed together; further requests wait; -1: the default (default: "
        "%(default)s)")  # fmt: skip
    add("-c", "--ctx-size", dest="n_ctx", type=int, metavar="N",
        help="tokens of the KV cache that all requests share, and the longest request; 0: the model's "
        "context "
        f"(default: that, at most {N_CTX})")  # fmt: skip
    add("-n", "--n-predict", "--predict", dest="max_tokens", type=int, default=-1, metavar="N",
        help="the limit of answers whose request has none, in tokens; -1: the end of the context "
        "(default: %(default)s)")  # fmt: skip
    add("--reasoning-format", choices=("auto", "deepseek", "none"), default="auto",
        help="where thoughts are in answers of requests that do not choose: auto, deepseek: in "
        "reasoning_content; none: in the text (default: %(default)s)")  # fmt: skip
    add("--ui", "--webui", action="store_true", default=True, help=argparse.SUPPRESS)
    add("--no-ui", "--no-webui", dest="ui", action="store_false", help="do not serve the page")
    add("--prefill-assistant", action="store_true", default=True, help=argparse.SUPPRESS)
    add("--no-prefill-assistant", dest="prefill_assistant", action="store_false",
        help="answer a last message of the assistant instead of continuing it")  # fmt: skip
    add("--ignore-eos", action="store_true", help="forbid the model's end-of-text tokens")
    add_template_arguments(parser, then="; a request's own values win")
    add_pooling_arguments(parser)
    add = parser.add_argument
    add("--embedding", "--embeddings", dest="embedding", action="store_true",
        help="only embed; without the flag, all that the model can do is served")  # fmt: skip
    add("--rerank", "--reranking", dest="reranking", action="store_true",
        help="only rerank; without the flag, all that the model can do is served")  # fmt: skip
    add_server_arguments(parser)
    add_shared_arguments(parser)


def run(args: argparse.Namespace) -> None:
    try:
        from vkbackend.tools.server.run import serve
        from vkbackend.tools.server.sockets import address_of, close, listen_at
    except ImportError as error:
        raise UnsupportedFeature(
            f"the server needs packages that are not installed ({error.name}); install the extra: "
            "`pip install 'vkbackend[serve]'`, in a checkout `bash tools/setup.sh --serve`"
        ) from None
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("vkbackend.serve").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # its warnings quote requests
    err = console(stderr=True)
    several = args.models_dir is not None or args.models_preset is not None or args.models_download
    service = several_models(args, err) if several or args.sleep_idle_seconds >= 0 else one_model(args, err)
    with ExitStack() as stack:
        socks = listen_at(hosts_of(args), args.port)
        for sock in socks:
            stack.callback(close, sock)
            address = address_of(sock, tls=bool(args.ssl_cert_file))
            err.print(f"listening at {address}", markup=False, soft_wrap=True)
        serve(service, socks, key_file=args.ssl_key_file, cert_file=args.ssl_cert_file)


def one_model(args: argparse.Namespace, err: Console) -> Front:
    from vkbackend.tools.server.model import Model
    from vkbackend.tools.server.service import Service

    settle(args, demo_model())
    path = demo_model() if args.model is None else args.model
    if args.n_slots == -1:  # the server chooses
        args.n_slots = N_SLOTS
    share_context(args, path)
    options_of(args, path)  # rejects wrong options early
    config = config_of(args, path)
    if args.model is None:
        tell_notes([NO_MODEL], err)
    tell_notes(getattr(args, "notes", ()), err)

    def open_(progress: Progress) -> LLM:
        llm = LLM(path, process=True, progress=progress, **fields_given(args, Options))
        tell_notes([*llm.prediction, *llm.notes], err)
        return llm

    return Service(config, Model(open_))


def several_models(args: argparse.Namespace, err: Console) -> Front:
    from vkbackend.tools.server.router.start import router_of

    settle_common(args)
    if args.models_dir is not None or args.models_preset is not None or args.models_download:
        named = [flag for flag, given in (("-m", args.model), ("-hf", args.hf_repo)) if given]
        if named:
            raise InvalidArgument(
                f"{named[0]} names one model, and --models-dir, --models-preset or --models-download several"
            )
    if args.hostfile is not None or runner.group:
        raise InvalidArgument("several hosts run one model; start a server without --models-dir for them")
    router, notes = router_of(args, config_of(args, args.model or "models"), entry_of)
    tell_notes([*getattr(args, "notes", ()), *notes], err)
    return router


def entry_of(args: argparse.Namespace, name: str) -> Entry:
    """Return the entry of a model with these flags. Raises InvalidArgument, GGUFError."""
    from vkbackend.tools.server.router.registry import Entry, fingerprint_of

    args.log_file = None  # the server has opened the log file
    settle(args, demo_model())
    path = demo_model() if args.model is None else args.model
    if args.n_slots == -1:
        args.n_slots = N_SLOTS
    if name:
        args.alias = (name, *args.alias)
    share_context(args, path)
    options, config = options_of(args, path), config_of(args, path)
    keywords = fields_given(args, Options)
    idle_s = float(args.sleep_idle_seconds)
    digest = fingerprint_of(options, [repr(config), str(idle_s)])
    return Entry(config.alias, options, config, keywords, options.devices, idle_s=idle_s, fingerprint=digest)


def hosts_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the addresses of --host, each once. Raises InvalidArgument."""
    given = [host for hosts in args.host or [HOSTS] for host in hosts]
    if not given:
        raise InvalidArgument("--host names no address; give one, for example 127.0.0.1")
    return tuple(dict.fromkeys(given))


def share_context(args: argparse.Namespace, path: str) -> None:
    """Set the context size. Without --kv-cells, all slots share -c tokens of cache."""
    if not args.n_ctx:
        args.n_ctx = own_context(path) if args.n_ctx == 0 else min(own_context(path), N_CTX)
    if args.kv_cells is None:
        args.kv_cells = args.n_ctx


def config_of(args: argparse.Namespace, path: str) -> Config:
    from vkbackend.tools.server.front import Config
    from vkbackend.tools.server.guard import Guard, default_origins, is_loopback, read_keys
    from vkbackend.tools.server.images import BODY_NBYTES
    from vkbackend.tools.server.limits import Limits
    from vkbackend.tools.server.media_fetch import checked_hosts
    from vkbackend.tools.server.sockets import is_file

    whole_number("port", args.port, 0, 65535)
    check_pooling(args)
    if args.embedding and args.reranking:
        raise InvalidArgument("--embedding and --reranking exclude each other; leave one out, or both")
    keys = [*args.api_key, *filter(None, [os.environ.get(KEY_VARIABLE)])]
    checked = read_keys(keys, args.api_key_file)
    for name in ("cors_methods", "cors_headers"):
        if not re.fullmatch(r"\*|[A-Za-z0-9-]+( *, *[A-Za-z0-9-]+)*", value := getattr(args, name)):
            flag = f"--{name.replace('_', '-')}"
            raise InvalidArgument(f"{flag} {value!r}: expected names with commas between them, or *")
    guard = Guard(
        checked,
        tuple(args.allowed_host),
        names_of(",".join(args.cors_origins)) or default_origins(checked),
        args.cors_methods,
        args.cors_headers,
        args.cors_credentials,
    )
    public = [host for host in hosts_of(args) if not (is_loopback(host) or is_file(host))]
    if not guard.keys and not args.insecure and public:
        raise InvalidArgument(
            f"--host {public[0]} is open to other machines and needs an API key; give one (--api-key-file), "
            "or allow everybody (--insecure)"
        )
    if bool(args.ssl_key_file) != bool(args.ssl_cert_file):
        raise InvalidArgument("TLS needs --ssl-key-file and --ssl-cert-file; one of them was given")
    if args.slot_save_path is not None:
        try:
            Path(args.slot_save_path).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(
                f"--slot-save-path {quoted(args.slot_save_path)} cannot be made ({why(error)}); "
                "give another folder"
            ) from None
    if args.timeout is not None:
        whole_number("timeout", args.timeout, 1, 86_400, " (seconds)")
    if not 0 <= args.shutdown_timeout < math.inf:
        raise InvalidArgument(f"--shutdown-timeout={args.shutdown_timeout}: expected seconds, 0 or more")
    if not 0 < args.sse_ping_interval < math.inf and args.sse_ping_interval != -1:
        raise InvalidArgument(
            f"--sse-ping-interval={args.sse_ping_interval}: expected seconds above 0, or -1 for no comments"
        )
    limits = Limits(
        queue=whole_number("queue", args.queue, 0, 4096),
        streams=whole_number("max_streams", args.max_streams, 1, 4096),
        shutdown_s=args.shutdown_timeout,
        ping_s=math.inf if args.sse_ping_interval == -1 else args.sse_ping_interval,
        **({} if args.timeout is None else {"body_s": args.timeout, "drain_s": args.timeout}),
        **({} if args.mmproj is None else {"body_nbytes": BODY_NBYTES}),
    )
    return Config(
        path,
        args.alias[0] if args.alias else Path(path).stem,
        guard,
        limits,
        defaults_of(args),
        token_limit("max_tokens", args.max_tokens),
        args.slot_save_path,
        args.slots,
        not args.log_disable,
        template_of(args),
        args.chat_template_kwargs,
        args.alias[1:],
        args.tags,
        args.ui,
        args.reasoning_format,
        args.metrics,
        args.props,
        getattr(args, "is_verbose", False),
        args.prefill_assistant,
        args.pooling,
        args.embd_normalize,
        args.embedding,
        args.reranking,
        checked_hosts(args.allowed_media_host),
    )


def names_of(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def defaults_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that differ from the built-in defaults of requests."""
    sampling = sampling_of(args)
    given = asdict(sampling)
    defaults: dict[str, Any] = {
        field.name: given[field.name]
        for field in fields(sampling)
        if field.name not in NOT_DEFAULTS and given[field.name] != field.default
    }
    if args.seed != -1:
        defaults["seed"] = args.seed
    if args.stop:
        defaults["stop"] = args.stop
    return defaults | structure_given(args) | ({"ignore_eos": True} if args.ignore_eos else {})


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["serve", *sys.argv[1:]]))
