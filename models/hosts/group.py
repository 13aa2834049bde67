"""The group of hosts that run one model, as a runner on any of them sees it.

Host 0 decides; the others load the same model and follow its messages (following.py). Every host opens its
own devices, and has stand-ins for the devices of other hosts. Before anything is loaded, all hosts compare
what must be equal; a difference is a PlanError that names the host.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from vkbackend import env
from vkbackend.errors import DeviceLost, InvalidArgument, PlanError, VkbackendError
from vkbackend.limits import Limits
from vkbackend.meta.bench import ReduceTime, time_reduce
from vkbackend.meta.elsewhere import Elsewhere
from vkbackend.meta.exchange_times import measure_exchanges, times_of
from vkbackend.meta.gather import PIECE_NBYTES
from vkbackend.meta.hosts import Hosts
from vkbackend.meta.mesh import Mesh
from vkbackend.meta.options import ReduceOptions
from vkbackend.meta.pulse import Pulse
from vkbackend.meta.step_kind import StepKind, Wanted
from vkbackend.meta.transport import Lane, Transport
from vkbackend.models.engine.micro_batch import MicroBatch
from vkbackend.models.engine.open_devices import open_devices
from vkbackend.models.hosts import node_messages
from vkbackend.models.hosts.node_cards import card_data, card_of, hash_of, limits_data, settings, tables_hash
from vkbackend.models.options import Options
from vkbackend.models.placement.fit import host_free_nbytes
from vkbackend.rope import RopeTable
from vkbackend.runtime import Device
from vkbackend.version import VERSION

JOIN_S = 120.0  # for a host to open its devices and to read the model's header
RECORD_S = 900.0  # to record and compile a step, while beats say that a host is alive
MAX_CARDS_NBYTES = 1 << 20
N_MEASURED = 30  # exchanges of each size


def place_of(word: str, n_hosts: int) -> tuple[int, str]:
    """(host, device there) of a device of a group, which is written HOST/DEVICE."""
    host, slash, device = word.partition("/")
    if not (slash and device and host.isascii() and host.isdecimal() and int(host) < n_hosts):
        raise InvalidArgument(
            f"device {word!r}: of a group of {n_hosts} hosts write HOST/DEVICE, such as 0/0"
        )
    return int(host), device


class Survey(NamedTuple):
    """`devices` of all hosts, which the caller closes. `where`: interface and ports of each host. `times`: by
    host, the median seconds of an exchange of each size with host 0."""

    devices: list[Device]
    where: list[str]
    times: dict[int, list[float]]


class Group:
    """The hosts, as this one sees them. `pulse`: send beats and watch those of the others, to see that they
    are alive (hosts that are threads of one process need none). `where`: the interface and ports of this
    host, as text."""

    def __init__(self, transport: Transport, *, pulse: bool = True, where: str = "") -> None:
        self.transport, self.hosts, self.where = transport, Hosts(transport, ()), where
        self.pulse = Pulse(transport) if pulse else None
        self.host_free: dict[int, int | None] = {}  # bytes that other hosts could give
        self.sends_tables = self._ended = False

    @property
    def leads(self) -> bool:
        return self.transport.rank == 0

    @property
    def lost(self) -> str:
        return self.transport.lost

    @property
    def names(self) -> list[str]:
        return self.transport.names

    # ---- saying ----

    def tell(self, call: Any) -> None:
        """Send a call to every other host. Raises DeviceLost if the group is broken."""
        if self.transport.lost:
            raise DeviceLost(f"{self.transport.lost}; open the model again")
        data = node_messages.encode(call)
        for host in self.transport.others:
            self.transport.send(host, Lane.CALL, data)

    def ask(self, host: int, call: Any, most: int, timeout_s: float | None = None) -> bytes:
        self.transport.send(host, Lane.CALL, node_messages.encode(call))
        return self.transport.receive(host, Lane.REPLY, most, "an answer", timeout_s)

    def reply(self, data: bytes) -> None:
        self.transport.send(0, Lane.REPLY, data)

    def next_call(self, timeout_s: float) -> Any:
        data = self.transport.receive(0, Lane.CALL, node_messages.MAX_CALL_NBYTES, "the next call", timeout_s)
        return node_messages.decode(data, node_messages.Call, self.names[0])

    def expect(self, type_: Any, timeout_s: float) -> Any:
        """The next call, which must be of that type."""
        call = self.next_call(timeout_s)
        if isinstance(call, node_messages.End):
            raise DeviceLost("host 0 gave up; its own message says why")
        if not isinstance(call, type_):
            raise DeviceLost(f"{self.names[0]} sent an unexpected {type(call).__name__}")
        return call

    # ---- joining ----

    def open(self, options: Options, interleave: bool | None) -> None:
        """Host 0: let the others begin to load."""
        given = {f.name: getattr(options, f.name) for f in fields(options)}
        self.tell(node_messages.Open(json.dumps(given).encode(), interleave))

    def join(
        self, options: Options, open_devices: Callable[[Sequence[str]], list[Device]], *, speeds: bool
    ) -> list[Device]:
        """All devices of the group in order: this host's, opened, and stand-ins; with `speeds` all are
        measured, and the network."""
        rank, n_hosts = self.transport.rank, self.transport.size
        places = [place_of(word, n_hosts) for word in options.devices or ()]
        own = open_devices([device for host, device in places if host == rank])
        numbers = [d for d, (host, _) in enumerate(places) if host == rank]
        mine = {d: card_data(device, speeds) for d, device in zip(numbers, own, strict=True)}
        try:
            cards = self._exchange_cards(node_messages.Cards(mine, host_free_nbytes()))
            missing = [d for d, (host, _) in enumerate(places) if host != rank and d not in cards]
            if missing:
                raise PlanError(f"no host has device {options.devices[missing[0]]}")  # type: ignore[index]
        except BaseException:
            for device in own:
                device.close()
            raise
        times = measure_exchanges(self.transport) if speeds else {}
        here = iter(own)
        self.hosts = Hosts(self.transport, [host for host, _ in places])
        devices: list[Device] = []
        for d, (host, _) in enumerate(places):
            if host == rank:
                devices.append(next(here))
                continue
            card = card_of(self.names[host], cards[d])
            stand_in = Elsewhere(d, self.names[host], card, times.get(host))
            stand_in.host_free = self.host_free.get(host)
            devices.append(stand_in)
        return devices

    def _exchange_cards(self, mine: node_messages.Cards) -> dict[int, node_messages.CardData]:
        """The devices of all hosts, through host 0."""
        if not self.leads:
            self.reply(node_messages.encode(mine))
            whole = node_messages.decode(
                self.transport.receive(0, Lane.REPLY, MAX_CARDS_NBYTES, "all devices", JOIN_S),
                node_messages.Cards,
                self.names[0],
            )
            return dict(whole.devices)
        found = dict(mine.devices)
        for host in self.transport.others:
            data = self.transport.receive(host, Lane.REPLY, MAX_CARDS_NBYTES, "the devices", JOIN_S)
            cards = node_messages.decode(data, node_messages.Cards, self.names[host])
            found |= cards.devices
            self.host_free[host] = cards.host_free
        for host in self.transport.others:
            self.transport.send(host, Lane.REPLY, node_messages.encode(node_messages.Cards(found)))
        return found

    def settle(self, options: Options) -> Options:
        """All hosts take over the shares and layers that host 0 decided."""
        if self.leads:
            shares = options.shares
            layers = options.n_gpu_layers
            assert layers != "auto"
            self.tell(node_messages.Settle(list(shares) if shares else None, layers))
            return options
        settled = self.expect(node_messages.Settle, RECORD_S)
        split = tuple(settled.tensor_split) if settled.tensor_split else None
        return replace(options, tensor_split=split, n_gpu_layers=settled.n_gpu_layers)

    def compare(
        self,
        model: str,
        options: Options,
        plan: str,
        limits: Sequence[Limits],
        sizes: object,
        ropes: Mapping[str, RopeTable],
    ) -> None:
        """Compare with host 0 what must be equal on all hosts: version, settings, the model's fingerprint,
        options, the plan, what devices can do, sizes of steps. Rows of cos and sin may differ, because
        processors round differently; host 0 then sends its own. Raises PlanError, which names the host and
        what differs."""
        local = ("path", "control_vectors")  # paths may differ between hosts
        given = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in local}
        likeness = node_messages.Likeness(
            VERSION,
            settings(),
            model[:64],
            hash_of(sorted(given.items())),
            plan=hash_of(plan),
            limits=hash_of([limits_data(one) for one in limits]),
            sizes=hash_of(sizes),
            tables=tables_hash(ropes, options.n_ctx),
        )
        if not self.leads:
            self.reply(node_messages.encode(likeness))
            self.expect(node_messages.Settle, RECORD_S)
            return
        for host in self.transport.others:
            data = self.transport.receive(host, Lane.REPLY, MAX_CARDS_NBYTES, "the plan", RECORD_S)
            other = node_messages.decode(data, node_messages.Likeness, self.names[host])
            for field in msgspec.structs.fields(node_messages.Likeness):
                name, here, there = field.name, getattr(likeness, field.name), getattr(other, field.name)
                if here == there:
                    continue
                if name == "tables":  # processors round cos and sin differently
                    env.log(1, f"{self.names[host]} has other rows of cos and sin; host 0 sends its own")
                    self.sends_tables = True
                    continue
                raise PlanError(
                    f"{self.names[host]} differs in its {name}: {there}, and {self.names[0]} has {here}; "
                    "use the same version, settings and model on all hosts"
                )
        self.tell(node_messages.Settle(None, None))  # go on

    def survey(self, places: Sequence[str], sizes: Sequence[int]) -> Survey:
        """Host 0, before anything is opened: the devices at `places`, measured, and what exchanges of these
        sizes take."""
        self.tell(node_messages.Measure(list(places), list(sizes)))
        options = Options("-", devices=tuple(places))
        devices = self.join(options, lambda own: open_devices(own) if own else [], speeds=True)
        where = [self.where]
        for host in self.transport.others:
            data = self.transport.receive(host, Lane.REPLY, MAX_CARDS_NBYTES, "the interface", JOIN_S)
            where.append(node_messages.decode(data, node_messages.Place, self.names[host]).where)
        return Survey(devices, where, self.measure(sizes))

    def time_reduce(self, places: Sequence[str], nbytes: int, how: ReduceOptions, repeats: int) -> ReduceTime:
        """As in meta/bench.py, over the devices at `places`. Host 0 asks for it."""
        ways = how.reduce_type, how.reduce_provider, how.submit_ahead
        call = node_messages.Reduces(list(places), nbytes, repeats, *ways)
        self.tell(call)
        found = self.run_reduces(call)
        for host in self.transport.others:
            exact = self.transport.receive(host, Lane.REPLY, 1, "its sums", RECORD_S) == b"1"
            found = replace(found, exact=found.exact and exact)
        return found

    def run_reduces(self, call: node_messages.Reduces) -> ReduceTime:
        """The part of `time_reduce` that every host runs."""
        options = Options("-", devices=tuple(call.devices))
        devices = self.join(options, lambda own: open_devices(own) if own else [], speeds=False)
        how = ReduceOptions(
            reduce_type=call.reduce_type,
            reduce_provider=call.reduce_provider,
            submit_ahead=call.submit_ahead,
        )
        return time_reduce(devices, call.nbytes, how, repeats=call.repeats, hosts=self.hosts)

    def measure(self, sizes: Sequence[int]) -> dict[int, list[float]]:
        """By host, the median seconds of an exchange of each size with host 0. Every host calls this, because
        host 0 asked it to."""
        found = {}
        for host in [0] if self.transport.rank else self.transport.others:
            times = [times_of(self.transport, host, nbytes, N_MEASURED) for nbytes in sizes]
            found[host] = [float(np.median(one)) for one in times]
        return found

    # ---- at work ----

    def loaded(self, mesh: Mesh) -> None:
        """Every host has loaded its part; host 0 reaches the devices of the others from now on."""
        self._same_provider(mesh)
        self.transport.meet("the others to load the model", RECORD_S)
        if self.leads:
            mesh.beside = self._beside
            for device in mesh.devices:
                if isinstance(device, Elsewhere):
                    device.link = self

    def _same_provider(self, mesh: Mesh) -> None:
        """Raise PlanError unless all hosts use the same provider: it decides how often hosts meet. Which
        provider a host's devices accept shows only when they are tried."""
        here = mesh.provider.name if mesh.provider else "nothing"
        if not self.leads:
            self.reply(here.encode())
            return
        for host in self.transport.others:
            name = self.transport.receive(host, Lane.REPLY, 64, "its provider", RECORD_S)
            if (there := name.decode(errors="replace")) != here:
                raise PlanError(
                    f"{self.names[host]} reduces by {there!r} and {self.names[0]} by {here!r}; "
                    "name one that both have: --reduce-provider host-sum"
                )

    @contextmanager
    def _beside(self, kind: StepKind) -> Iterator[None]:
        self.tell(node_messages.Record.of(kind))
        try:
            yield
        except BaseException as error:  # the others recorded it, or wait for us: the hosts no longer agree
            self.transport.lost = f"{self.names[0]} could not record a step: {error}"
            raise
        self.met()

    def met(self) -> None:
        """Wait until all hosts have recorded a step: each takes as long as its compilers do."""
        self.transport.meet("the others to record a step", RECORD_S)

    def step(self, batch: MicroBatch, wanted: Wanted, tables: Mapping[str, np.ndarray] | None = None) -> None:
        """Let the others run a micro-batch."""
        tokens, runs, outputs, masks = batch
        sent = [
            node_messages.RunData(r.slot, r.first_row, r.n_rows, r.first_pos, *(r.states or (-1, -1)))
            for r in runs
        ]
        rows = {name: table.tobytes() for name, table in tables.items()} if tables else None
        packed = None if masks is None else np.ascontiguousarray(masks).tobytes()
        self.tell(
            node_messages.Step(list(tokens), sent, list(outputs), wanted.top_k, packed, wanted.summed, rows)
        )

    def write(self, device: int, name: str, offset: int, data: np.ndarray) -> None:
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        for at in range(0, raw.size, PIECE_NBYTES):
            call = node_messages.Write(device, name, offset + at, raw[at : at + PIECE_NBYTES].tobytes())
            self.transport.send(self.hosts.of[device], Lane.CALL, node_messages.encode(call))

    def read(self, device: int, name: str, offset: int, nbytes: int) -> np.ndarray:
        host, out = self.hosts.of[device], np.empty(nbytes, np.uint8)
        for at in range(0, nbytes, PIECE_NBYTES):
            n = min(PIECE_NBYTES, nbytes - at)
            data = self.ask(
                host, node_messages.Read(device, name, offset + at, n), node_messages.MAX_REPLY_NBYTES
            )
            if len(data) != n:
                raise DeviceLost(f"{self.names[host]} gave {len(data)} bytes of {name}, {n} were asked for")
            out[at : at + n] = np.frombuffer(data, np.uint8)
        return out

    def copy(self, device: int, copies: list[tuple[str, int, int, int]]) -> None:
        for at in range(0, len(copies), node_messages.MAX_COPIES):
            part = [node_messages.CopyData(*one) for one in copies[at : at + node_messages.MAX_COPIES]]
            host = self.hosts.of[device]
            self.transport.send(host, Lane.CALL, node_messages.encode(node_messages.CopyRanges(device, part)))

    def memory(self) -> dict[int, dict[str, Any]]:
        """What the other hosts say of their devices."""
        found: dict[int, dict[str, Any]] = {}
        for host in self.transport.others:
            data = self.ask(host, node_messages.AskMemory(), node_messages.MAX_REPLY_NBYTES)
            found |= node_messages.decode(data, node_messages.MemoryReport, self.names[host]).devices
        return found

    # ---- ends ----

    def on_lost(self, tell: Callable[[VkbackendError], None]) -> None:
        """Call `tell` when a host is lost, whatever happens meanwhile."""
        if self.pulse:
            self.pulse.on_lost = lambda: tell(DeviceLost(f"{self.transport.lost}; open the model again"))

    def fail(self, words: str) -> None:
        """Tell the others that this host cannot go on."""
        for host in [0] if self.transport.rank else self.transport.others:
            self.transport.send(host, Lane.FAILURE, words.encode()[:4000])

    def leave(self) -> None:
        """Leave the group when the others do."""
        if self.pulse:
            self.pulse.close()
        self.transport.close()

    def close(self) -> None:
        """Host 0 tells the others to end, once. If the group is already broken, nothing is sent."""
        if self.leads and not self.transport.lost and not self._ended:
            self._ended = True
            self.tell(node_messages.End())
