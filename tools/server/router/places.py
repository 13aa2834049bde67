"""Computes where a model may be loaded: devices, bytes on each, and speed.

No device is opened. Models are planned on stand-in devices, which have the limits of the real devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from vkbackend.errors import InvalidArgument, OutOfDeviceMemory
from vkbackend.meta.elsewhere import Card, Elsewhere
from vkbackend.meta.exchange_times import ExchangeTime
from vkbackend.models.arguments import HOST
from vkbackend.models.engine.projectors import planned_projector, projector_index, projector_words
from vkbackend.models.engine.runner.planned_memory import planned_memory
from vkbackend.models.fitting.fitter import COMFORTABLE
from vkbackend.models.fitting.flags import flags
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options, with_a_share
from vkbackend.models.placement.fit import ON_DEVICE, mib
from vkbackend.models.placement.memory_report import Held
from vkbackend.tools.server.router.cards import FoundCard, Machine

NODE = "this machine"
OFFLOADS = "n_gpu_layers", "override_tensor", "moe_cache_mib"
UNMEASURED = ExchangeTime(1e-4, 1e10)  # assumed time of exchanges between two devices, for choosing shares


@dataclass(frozen=True, slots=True)
class Place:
    """`devices` are the words of -dev. `held` maps each device and the host to bytes. `speed` is the bytes
    per second at which the slowest device reads weights. `chosen` holds the options that `--fit` chose, and
    the projector's device. `flags` holds the options that `--fit` chose, as text."""

    devices: tuple[str, ...]
    held: Mapping[str, int]
    speed: float
    chosen: Mapping[str, Any] = field(default_factory=dict)
    flags: str = ""

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self.held)


def budgets_of_machine(machine: Machine, device_nbytes: int | None) -> dict[str, int]:
    """Return the number of bytes that models may hold, by device and on the host. `device_nbytes` replaces
    the free memory of each device. A device with unknown memory shares the host's memory."""
    free = 1 << 62 if machine.host_nbytes is None else machine.host_nbytes
    budgets = {HOST: free}
    for card in machine.cards.values():
        known = free if card.budget is None else card.budget
        budgets[card.key] = known if device_nbytes is None else device_nbytes
    return budgets


def places_of(
    options: Options, machine: Machine, budgets: Mapping[str, int], devices: Sequence[str] | None
) -> list[Place]:
    """Return the places of a model, the fastest first.

    `devices` are the devices that the user chose. Otherwise a place is a single device of the machine. If the
    model fits on no single device, the place is all devices together. Raises OutOfDeviceMemory if the model
    does not fit on empty devices. Also raises the errors of loading.
    """
    if devices is not None:
        return [place_on(options, tuple(devices), machine, budgets)]
    places, failed = list[Place](), None
    for word in machine.names:
        try:
            places.append(place_on(options, (word,), machine, budgets))
        except OutOfDeviceMemory as error:
            failed = error
    if not places and len(machine.names) > 1:
        places.append(place_on(options, machine.names, machine, budgets))
    elif failed is not None and not places:
        raise failed
    return sorted(places, key=lambda place: -place.speed)


def fitted_places(
    options: Options,
    machine: Machine,
    budgets: Mapping[str, int],
    left: Mapping[str, int],
    devices: Sequence[str] | None,
) -> list[Place]:
    """Return the places of a model with `--fit`, in the bytes that are `left` of the budgets. If these bytes
    do not suffice for the complete model, other models must make room for the shortest context, and the model
    is planned again. Weights move to host memory only if they do not fit on empty devices."""
    whole = replace(options, fit=tuple(name for name in options.fit if name not in OFFLOADS))
    n_ctx = min(options.n_ctx, options.fit_ctx)
    shortest = replace(whole, fit=tuple(name for name in whole.fit if name != "n_ctx"), n_ctx=n_ctx)
    for wanted, room in ((whole, left), (shortest, budgets)):
        with suppress(OutOfDeviceMemory):
            places = places_of(wanted, machine, room, devices)
            enough = min(COMFORTABLE, max(place.chosen["n_ctx"] for place in places))
            return [place for place in places if place.chosen["n_ctx"] >= enough]
    return places_of(options, machine, budgets, devices)


def place_on(
    options: Options, devices: tuple[str, ...], machine: Machine, budgets: Mapping[str, int]
) -> Place:
    """Raises OutOfDeviceMemory if the model does not fit on these devices while they are empty."""
    options = with_a_share(replace(options, devices=devices))
    devices = options.devices or devices
    if unknown := [word for word in (*devices, *words_beside(options)) if word not in machine.cards]:
        raise InvalidArgument(f"device {unknown[0]!r} is new in the list of models; start the server again")
    held = Counter({HOST: max(0, options.cache_ram) << 20})
    left, chosen, words = dict(budgets), dict[str, Any](), ""
    for wanted in (options.of_draft, options):  # The draft model and the projector are opened first.
        if wanted is None:
            continue
        if wanted.mmproj is not None:
            word = _projector_word(wanted, machine, left)
            chosen["mmproj_device"] = word
            card = machine.cards[word]
            plan = planned_projector(wanted, _stand_in(0, card, left))
            plan.check_fit()
            held += _by_key([plan.held], [card])
            left = {key: max(0, nbytes - held[key]) for key, nbytes in budgets.items()}
        cards = [machine.cards[word] for word in wanted.devices or devices[:1]]
        stand_ins = [_stand_in(i, card, left) for i, card in enumerate(cards)]
        sizes, settled = planned_memory(wanted, stand_ins)
        held += _by_key(sizes, cards)
        left = {key: max(0, nbytes - held[key]) for key, nbytes in budgets.items()}
        if wanted.fit:
            asked = replace(wanted, fit=tuple({*wanted.fit, "n_ctx"}))
            chosen |= {name: getattr(settled, name) for name in asked.fit} | {"fit": False}
            words = flags(settled, asked)
    for key, nbytes in held.items():
        if nbytes > budgets[key]:
            raise OutOfDeviceMemory(
                f"the model needs {mib(nbytes)} of {_name(key, machine)}, where models may hold "
                f"{mib(budgets[key])}; use more devices, a smaller model or a smaller context (-c)"
                + (", or less --cache-ram" if key == HOST and options.cache_ram > 0 else ""),
                requested=nbytes,
                budget=budgets[key],
            )
    speeds = [card.card.speed[0] for word in devices if (card := machine.cards[word]).card.speed]
    return Place(devices, dict(held), min(speeds, default=1.0), chosen, words)


def words_beside(options: Options) -> tuple[str, ...]:
    """Return the words for devices that only the draft model or the projector names."""
    named = options.mmproj is not None and options.mmproj_device
    return (*(options.draft_devices or ()), *(projector_words(options) if named else []))


def _projector_word(options: Options, machine: Machine, budgets: Mapping[str, int]) -> str:
    words = projector_words(options)
    if len(set(words)) < 2:
        return words[0]
    stand_ins = [_stand_in(i, machine.cards[word], budgets) for i, word in enumerate(words)]
    with GGUF.open(options.path) as text:
        return words[projector_index(options, stand_ins, text)]


def _name(key: str, machine: Machine) -> str:
    names = [card.card.name for card in machine.cards.values() if card.key == key != HOST]
    return names[0] if names else "host memory"


def _by_key(sizes: Sequence[Held], cards: Sequence[FoundCard]) -> Counter[str]:
    held: Counter[str] = Counter()
    for size, card in zip(sizes, cards, strict=True):
        on_device = sum(size.homes[home] for home in ON_DEVICE)
        held[card.key] += on_device
        held[HOST] += sum(size.homes.values()) - on_device - size.homes["mapped"]
    return held


def _stand_in(index: int, card: FoundCard, budgets: Mapping[str, int]) -> Elsewhere:
    stand_in = Elsewhere(index, NODE, _emptied(card.card, budgets[card.key]), UNMEASURED)
    stand_in.name, stand_in.host_free = card.card.name, budgets[HOST]
    stand_in.maps_files = card.maps_files
    return stand_in


def _emptied(card: Card, nbytes: int) -> Card:
    if (physical := card.physical) is None:
        return card
    heaps = tuple(replace(heap, budget=nbytes) if heap.device_local else heap for heap in physical.heaps)
    return replace(card, physical=replace(physical, heaps=heaps))
