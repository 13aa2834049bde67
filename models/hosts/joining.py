"""Nodes load one model together. Each node opens its own devices, and creates placeholders for other nodes'
devices. Node 0 decides the layout. Before loading, nodes compare the values that must be equal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import msgspec

from vkbackend import env
from vkbackend.errors import InvalidArgument, PlanError
from vkbackend.limits import Limits
from vkbackend.meta.elsewhere import Elsewhere
from vkbackend.meta.exchange_times import measure_exchanges
from vkbackend.meta.nodes import Nodes
from vkbackend.models.engine.runner.group import OpenDevices
from vkbackend.models.hosts import node_messages
from vkbackend.models.hosts.calls import JOIN_S, RECORD_S, Calls
from vkbackend.models.hosts.node_cards import card_data, card_of, hash_of, limits_data, settings, tables_hash
from vkbackend.models.options import Options
from vkbackend.models.placement.host_limits import host_free_nbytes
from vkbackend.rope import RopeTable
from vkbackend.runtime import Device
from vkbackend.version import VERSION


def place_of(word: str, n_nodes: int) -> tuple[int, str]:
    """Split NODE/DEVICE into (node, device on the node)."""
    node, slash, device = word.partition("/")
    if not (slash and device and node.isascii() and node.isdecimal() and int(node) < n_nodes):
        raise InvalidArgument(f"device {word!r}: in a group of {n_nodes} nodes write NODE/DEVICE, as in 0/0")
    return int(node), device


class Joining:
    """`nodes` holds the node of each device. If `sends_tables`, node 0 sends its rows of cos and sin."""

    def __init__(self, calls: Calls) -> None:
        self._calls, self.nodes = calls, Nodes(calls.transport, ())
        self.sends_tables = False

    @property
    def leads(self) -> bool:
        return self._calls.leads

    def open(self, options: Options, interleave: bool | None) -> None:
        if self.leads:
            given = {f.name: getattr(options, f.name) for f in fields(options)}
            self._calls.tell(node_messages.Open(json.dumps(given).encode(), interleave))

    def join(self, options: Options, open_devices: OpenDevices, *, speeds: bool) -> list[Device]:
        """Return all devices in order, with placeholders for other nodes' devices. If `speeds` is set, also
        measure the devices and the network."""
        transport = self._calls.transport
        places = [place_of(word, transport.size) for word in options.devices or ()]
        here = [d for d, (node, _) in enumerate(places) if node == transport.rank]
        opened = open_devices([places[d][1] for d in here]) if here else []
        try:
            mine = {d: card_data(device, speeds) for d, device in zip(here, opened, strict=True)}
            cards, free = self._exchange_cards(node_messages.Cards(mine, host_free_nbytes()))
            missing = [d for d in range(len(places)) if d not in here and d not in cards]
            if missing:
                raise PlanError(f"no node has device {options.devices[missing[0]]}")  # type: ignore[index]
        except BaseException:
            for device in opened:
                device.close()
            raise
        times = measure_exchanges(transport) if speeds else {}
        self.nodes = Nodes(transport, [node for node, _ in places])
        devices: list[Device] = []
        for d, (node, _) in enumerate(places):
            if node == transport.rank:
                devices.append(opened.pop(0))
                continue
            name = self._calls.names[node]
            stand_in = Elsewhere(d, name, card_of(name, cards[d]), times.get(node))
            stand_in.host_free = free.get(node)
            devices.append(stand_in)
        return devices

    def _exchange_cards(
        self, mine: node_messages.Cards
    ) -> tuple[dict[int, node_messages.CardData], dict[int, int | None]]:
        """Exchange cards (descriptions of devices) through node 0. Node 0 also gets each node's free host
        memory."""
        calls = self._calls
        if not self.leads:
            calls.reply(node_messages.encode(mine))
            return dict(calls.answer(node_messages.Cards, "all devices", JOIN_S).devices), {}
        cards, free = dict(mine.devices), {}
        for node, reply in calls.replies(node_messages.Cards, "the devices", JOIN_S):
            cards |= reply.devices
            free[node] = reply.host_free
        calls.answer_all(node_messages.Cards(cards))
        return cards, free

    def settled(self, options: Options) -> Options:
        """Return options with node 0's decisions."""
        if self.leads:
            return options
        call = self._calls.expect(node_messages.Settle, RECORD_S)
        split = tuple(call.tensor_split) if call.tensor_split else None
        fitted = msgspec.structs.asdict(call.fitted) if call.fitted else {}
        if fitted:
            fitted |= {"fit": (), "override_tensor": tuple(fitted["override_tensor"])}
        return replace(options, tensor_split=split, n_gpu_layers=call.n_gpu_layers, **fitted)

    def settle(self, options: Options, *, fitted: bool) -> None:
        """Tell the other nodes the options. `fitted` is true if `fit` chose some of them."""
        if self.leads:
            shares, n_layers = options.shares, options.n_gpu_layers
            assert n_layers != "auto"
            chosen = node_messages.Fitted.of(options) if fitted else None
            self._calls.tell(node_messages.Settle(list(shares) if shares else None, n_layers, chosen))

    def compare(
        self,
        model: str,
        options: Options,
        plan: str,
        limits: Sequence[Limits],
        sizes: object,
        ropes: Mapping[str, RopeTable],
    ) -> None:
        """Compare with node 0 the values that must be equal. Raises PlanError with the node and the
        difference. Rows of cos and sin may differ, because processors round differently."""
        local = ("path", "draft", "control_vectors", "lora")  # these paths may differ between nodes
        given = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in local}
        mine = node_messages.Likeness(
            VERSION,
            settings(),
            model[:64],
            hash_of(sorted(given.items())),
            plan=hash_of(plan),
            limits=hash_of([limits_data(device) for device in limits]),
            sizes=hash_of(sizes),
            tables=tables_hash(ropes, options.n_ctx),
        )
        calls = self._calls
        if not self.leads:
            calls.reply(node_messages.encode(mine))
            calls.expect(node_messages.Settle, RECORD_S)
            return
        for node, theirs in calls.replies(node_messages.Likeness, "the plan", RECORD_S):
            for field in msgspec.structs.fields(node_messages.Likeness):
                name, here, there = field.name, getattr(mine, field.name), getattr(theirs, field.name)
                if here == there:
                    continue
                if name == "tables":
                    env.log(1, f"{calls.names[node]} rounds cos and sin differently; node 0 sends its rows")
                    self.sends_tables = True
                    continue
                raise PlanError(
                    f"{calls.names[node]} differs in its {name}: {there}, and {calls.names[0]} has {here}; "
                    "use the same version, settings and model on all nodes"
                )
        calls.tell(node_messages.Settle(None, None))

    def compare_providers(self, here: str) -> None:
        """Raise PlanError unless all nodes use the same reduce provider. Whether a provider works on a node
        is known only after a trial."""
        calls = self._calls
        if not self.leads:
            calls.reply(node_messages.encode(here))
            return
        for node, there in calls.replies(node_messages.Name, "its provider", RECORD_S):
            if there != here:
                raise PlanError(
                    f"{calls.names[node]} reduces by {there!r} and {calls.names[0]} by {here!r}; "
                    "name one that both have: --reduce-provider host-sum"
                )
