"""Flags of the server: access, limits, and the list of models."""

from __future__ import annotations

import argparse

CORS_METHODS = "GET, POST, DELETE, OPTIONS"
KEY_VARIABLE = "VKBACKEND_API_KEY"
MODELS_MAX, LOAD_S = 4, 300.0


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    _add_models(parser)
    _add_security(parser)
    _add_bounds(parser)


def _add_models(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("several models (docs/serving.md)").add_argument
    add("--models-dir", metavar="FOLDER",
        help="serve the models of this folder, instead of -m: .gguf files, and sub-folders with the parts of "
        "a model; requests name one")  # fmt: skip
    add("--models-preset", metavar="FILE",
        help="an INI file of models and their flags, as llama-server's: [NAME], then KEY = VALUE; [*] is for "
        "all")  # fmt: skip
    add("--models-download", action="store_true",
        help="let clients download models from the Hugging Face Hub (POST /models) and delete them (DELETE "
        "/models); also serve the models that were downloaded before")  # fmt: skip
    add("--models-max", type=int, default=MODELS_MAX, metavar="N",
        help="how many models may be loaded at once; 0: as many as fit (default: %(default)s)")  # fmt: skip
    add("--models-autoload", action="store_true", default=True,
        help="load the model that a request names (the default)")  # fmt: skip
    add("--no-models-autoload", dest="models_autoload", action="store_false",
        help="load models only on POST /models/load")  # fmt: skip
    add("--models-memory", type=int, metavar="MIB",
        help="the memory of each device that models may hold together (default: what is free at the "
        "start)")  # fmt: skip
    add("--models-devices", metavar="LIST",
        help="the devices among which models without -dev are placed, each on one if it fits (default: all "
        "GPUs)")  # fmt: skip
    add("--load-timeout", type=float, default=LOAD_S, metavar="S",
        help="seconds that a request waits for its model to load (default: %(default)s)")  # fmt: skip
    add("--sleep-idle-seconds", type=int, default=-1, metavar="N",
        help="unload a model after N seconds without a request; -1: never (default: "
        "%(default)s)")  # fmt: skip


def _add_security(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("access").add_argument
    add("--api-key", action="append", default=[], metavar="KEY",
        help="a key that clients must send; other users of this machine can see it in the list of "
        f"processes, so prefer a file or ${KEY_VARIABLE}; may be repeated")  # fmt: skip
    add("--api-key-file", metavar="FILE", help="keys, one a line")
    add("--insecure", action="store_true", help="listen to other machines without a key")
    add("--allowed-host", action="append", default=[], metavar="NAME",
        help="another name of this server, besides addresses, localhost and the machine's own; may be "
        "repeated")  # fmt: skip
    add("--allowed-media-host", action="append", default=[], metavar="NAME",
        help="fetch images that requests name by https URLs of this host; may be repeated (default: nothing "
        "is fetched)")  # fmt: skip
    add("--cors-origins", action="append", default=[], metavar="ORIGIN,...",
        help="allow requests from pages of ORIGIN, for example https://chat.example; localhost: of this "
        "machine; *: all; may be repeated (default: localhost, and * with an API key)")  # fmt: skip
    add("--cors-methods", default=CORS_METHODS, metavar="METHOD,...",
        help="the methods that these pages may use (default: %(default)s)")  # fmt: skip
    add("--cors-headers", default="*", metavar="HEADER,...",
        help="the headers that these pages may send (default: those that a page asks for)")  # fmt: skip
    add("--cors-credentials", action="store_true",
        help="let these pages send cookies, which a proxy may check (default: off)")  # fmt: skip
    add("--no-cors-credentials", dest="cors_credentials", action="store_false", help=argparse.SUPPRESS)
    add("--ssl-key-file", metavar="FILE", help="the private key of TLS, PEM")
    add("--ssl-cert-file", metavar="FILE", help="the certificate of TLS, PEM")
    add("--slot-save-path", metavar="FOLDER",
        help="where /slots saves and restores; made if missing (default: nowhere)")  # fmt: skip
    add("--metrics", action="store_true", help="show counters for Prometheus at /metrics")
    add("--props", action="store_true", help="accept POST /props")
    add("--slots", action="store_true", default=True, help=argparse.SUPPRESS)
    add("--no-slots", dest="slots", action="store_false", help="do not show slots at /slots")


def _add_bounds(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("bounds (docs/serving.md has all)").add_argument
    add("--queue", type=int, default=256, metavar="N",
        help="how many sequences may wait for a slot; further requests get 429 (default: "
        "%(default)s)")  # fmt: skip
    add("--max-streams", type=int, default=128, metavar="N",
        help="how many answers may be streamed at once (default: %(default)s)")  # fmt: skip
    add("--shutdown-timeout", type=float, default=30.0, metavar="S",
        help="how long running answers may go on after SIGTERM, in seconds (default: "
        "%(default)s)")  # fmt: skip
    add("--sse-ping-interval", type=float, default=15.0, metavar="S",
        help="seconds until a stream without an event gets a comment; -1: no comments (default: "
        "%(default)s)")  # fmt: skip
    add("-to", "--timeout", type=int, metavar="S",
        help="seconds for a client to send its body, and to read what it was sent (default: 10)")  # fmt: skip
    add("--log-disable", action="store_true", help="do not log requests")
