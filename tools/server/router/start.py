"""Creates a server with several models from the flags of `serve`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from vkbackend.checks import finite_number, whole_number
from vkbackend.errors import InvalidArgument
from vkbackend.meta.load import Progress
from vkbackend.models.arguments import device_list
from vkbackend.models.hub_cache import cached_models
from vkbackend.models.llm import LLM
from vkbackend.paths import quoted
from vkbackend.tools.cli import build_parser
from vkbackend.tools.cli import parse as parse_words
from vkbackend.tools.console import MIB
from vkbackend.tools.server.front import Config
from vkbackend.tools.server.images import BODY_NBYTES
from vkbackend.tools.server.limits import Limits
from vkbackend.tools.server.router.cards import Machine, look
from vkbackend.tools.server.router.places import (
    Place,
    budgets_of_machine,
    fitted_places,
    places_of,
    words_beside,
)
from vkbackend.tools.server.router.pool import Plan, Pool, PoolSettings
from vkbackend.tools.server.router.presets import Preset, read_presets
from vkbackend.tools.server.router.registry import Entry, Notes, fingerprint_of, listed
from vkbackend.tools.server.router.router import Router

Listing = Callable[[], tuple[Sequence[Entry], Notes]]


def router_of(
    args: argparse.Namespace, config: Config, make: Callable[[argparse.Namespace, str], Entry]
) -> tuple[Router, Notes]:
    """Read the list of models, describe the devices, and return the server and notes. `make(args, name)`
    turns a model's flags into an entry. Raises InvalidArgument and the errors of opening a device."""
    settings = settings_of(args, config.limits)
    relist = listing_of(args, make)
    entries, notes = relist()
    if any(entry.options.mmproj for entry in entries):
        config = replace(config, limits=replace(config.limits, body_nbytes=BODY_NBYTES))
    named = device_list("models_devices", args.models_devices) or ()
    others = [word for entry in entries for word in _words_of(entry)]
    machine = look(named, list(dict.fromkeys(others)), args.runtime)
    memory = None if args.models_memory is None else args.models_memory * MIB
    budgets = budgets_of_machine(machine, memory)
    pool = Pool(entries, _plan(machine, budgets), open_entry, budgets, settings)
    return Router(config, pool, relist, not is_list(args), args.models_download), notes


def is_list(args: argparse.Namespace) -> bool:
    return args.models_dir is not None or args.models_preset is not None or args.models_download


def settings_of(args: argparse.Namespace, limits: Limits) -> PoolSettings:
    """Raises InvalidArgument."""
    if args.models_memory is not None:
        whole_number("models_memory", args.models_memory, 1, 1 << 30, " (MiB)")
    return PoolSettings(
        most=whole_number("models_max", args.models_max, 0, 1000, " (0: no limit)"),
        loads=args.models_autoload,
        load_s=finite_number("load_timeout", args.load_timeout, 0.1, 86_400, " (seconds)"),
        queue=limits.queue,
    )


def listing_of(args: argparse.Namespace, make: Callable[[argparse.Namespace, str], Entry]) -> Listing:
    """Return a function that reads the folder and the presets. Without folder and presets, the list contains
    one model."""
    line = list(args.line)

    def parsed(words: Sequence[str]) -> argparse.Namespace:
        return parse_words(["serve", *words], raises=True)[0]

    def actions(words: Sequence[str]) -> dict[str, argparse.Action]:
        return build_parser("serve", words)[1]._option_string_actions

    def entry(name: str, words: Sequence[str], preset: Preset, source: str) -> Entry:
        made = make(parsed([*words, *line]), name)
        return replace(made, source=source, loads=preset.loads, stop_s=preset.stop_s)

    def read() -> tuple[Sequence[Entry], Notes]:
        if not is_list(args):
            return [replace(make(parsed(line), ""), source="model", loads=True)], []
        presets = read_presets(args.models_preset, actions, parsed) if args.models_preset else {}
        cached = cached_models() if args.models_download else {}
        entries, notes = listed(args.models_dir, presets, entry, cached)
        if not entries and not args.models_download:
            places = " and ".join(quoted(path) for path in (args.models_dir, args.models_preset) if path)
            raise InvalidArgument(f"{places}: no models are there; add .gguf files or presets")
        return list(entries.values()), notes

    return read


def _words_of(entry: Entry) -> tuple[str, ...]:
    return (*(entry.devices or ()), *words_beside(entry.options))


def _plan(machine: Machine, budgets: Mapping[str, int]) -> Plan:
    known: dict[str, tuple[str, list[Place]]] = {}

    def plan(entry: Entry, left: Mapping[str, int]) -> list[Place]:
        options, devices = entry.options, entry.devices
        if options.fit:
            return fitted_places(options, machine, budgets, left, devices)
        files = fingerprint_of(options, devices or ())
        if known.get(entry.name, ("",))[0] != files:
            known[entry.name] = files, places_of(options, machine, budgets, devices)
        return known[entry.name][1]

    return plan


def open_entry(entry: Entry, place: Place, progress: Progress) -> LLM:
    given = {**entry.keywords, "devices": list(place.devices), **place.chosen}
    return LLM(entry.options.path, process=True, progress=progress, **given)
