"""Measures the nodes of a group before a model is loaded, for `hosts check` and `bench-reduce`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from vkbackend.meta.bench import ReduceTime, time_reduce
from vkbackend.meta.exchange_times import times_of
from vkbackend.meta.known_ways import ONE_CALL
from vkbackend.meta.options import ReduceOptions
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.hosts import node_messages
from vkbackend.models.hosts.calls import JOIN_S, RECORD_S
from vkbackend.models.hosts.group import Group
from vkbackend.models.options import Options
from vkbackend.runtime import Device

N_MEASURED = 30  # exchanges of each size


class Survey(NamedTuple):
    """The caller closes `devices`. `where` lists each node's interface and ports. `times` maps a size to each
    node's median seconds of an exchange with node 0."""

    devices: list[Device]
    where: list[str]
    times: dict[int, list[float]]


def survey(group: Group, places: Sequence[str], sizes: Sequence[int]) -> Survey:
    """Measure the devices of all nodes, which `places` lists, and time exchanges of `sizes` bytes. Call this
    on node 0 only."""
    group.tell(node_messages.Measure(list(places), list(sizes)))
    devices = _join(group, places, speeds=True)
    replies = group.replies(node_messages.Place, "the interface", JOIN_S)
    where = [group.where, *(reply.where for _, reply in replies)]
    return Survey(devices, where, _exchanges(group, sizes))


def answer_survey(group: Group, call: node_messages.Measure) -> None:
    for device in _join(group, call.devices, speeds=True):
        device.close()
    group.reply(node_messages.encode(node_messages.Place(group.where)))
    _exchanges(group, call.sizes)


def time_reduces(
    group: Group, places: Sequence[str], nbytes: int, how: ReduceOptions, repeats: int
) -> ReduceTime:
    ahead, signal = how.relaying(())
    assert ahead != ONE_CALL, "one call submits the steps of one machine"
    ways = how.reduce_type, how.reduce_provider, ahead, signal
    call = node_messages.Reduces(list(places), nbytes, repeats, *ways)
    group.tell(call)
    times = _run_reduces(group, call)
    exact = [reply for _, reply in group.replies(bool, "its sums", RECORD_S)]
    return replace(times, exact=times.exact and all(exact))


def answer_reduces(group: Group, call: node_messages.Reduces) -> None:
    group.reply(node_messages.encode(_run_reduces(group, call).exact))


def _run_reduces(group: Group, call: node_messages.Reduces) -> ReduceTime:
    devices = _join(group, call.devices, speeds=False)
    how = ReduceOptions(
        reduce_type=call.reduce_type,
        reduce_provider=call.reduce_provider,
        submit_ahead=call.submit_ahead,
        reduce_signal=call.reduce_signal,
    )
    return time_reduce(devices, call.nbytes, how, repeats=call.repeats, nodes=group.nodes)


def _join(group: Group, places: Sequence[str], *, speeds: bool) -> list[Device]:
    options = Options("-", devices=tuple(places))
    return group.joining.join(options, open_devices, speeds=speeds)


def _exchanges(group: Group, sizes: Sequence[int]) -> dict[int, list[float]]:
    transport = group.transport
    return {
        node: [float(np.median(times_of(transport, node, nbytes, N_MEASURED))) for nbytes in sizes]
        for node in ([0] if transport.rank else transport.others)
    }
