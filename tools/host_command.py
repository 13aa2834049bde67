"""The process of node 0, in which `vkbackend hosts run` and `hosts check` run their command."""

from __future__ import annotations

import argparse
import os
import sys

from vkbackend.errors import VkbackendError
from vkbackend.meta.speed import measure_speed
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.hosts.group import Group
from vkbackend.models.hosts.hostfile import HostFile, read_hostfile
from vkbackend.models.hosts.rank import add_arguments, arrive
from vkbackend.models.hosts.rank import run as run_rank
from vkbackend.models.hosts.survey import survey
from vkbackend.runtime import Device
from vkbackend.tools import cli
from vkbackend.tools.console import console, size, table
from vkbackend.tools.flags import runner
from vkbackend.tools.measure.node_advice import NodeRates, advice, placements

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
EXCHANGE_NBYTES = 16 << 10  # one token's sum in a layer of width 4,096


def main() -> int:
    parser = argparse.ArgumentParser(description="Node 0 of a group; started by `vkbackend hosts`.")
    add_arguments(parser)
    parser.add_argument("--hostfile", required=True)
    parser.add_argument("words", nargs="+")
    args = parser.parse_args()
    group, hostfile = arrive(args), read_hostfile(args.hostfile)
    group.on_lost(_end)
    if args.words[0] == "check":
        code = check(group, hostfile, args.words[2] if len(args.words) > 2 else None)
    else:
        runner.group, runner.places = group, hostfile.places
        code = cli.main(args.words)
    group.close()
    group.leave()
    return code


def _end(error: VkbackendError) -> None:
    """Exit immediately, because a normal exit would wait forever for the lost node."""
    print(f"vkbackend: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(2)


def check(group: Group, hostfile: HostFile, model: str | None) -> int:
    out = console()
    devices, where, times = survey(group, hostfile.places, SIZES)
    rates = [_rates(node, group, devices) for node in range(group.transport.size)]
    rows = [
        (name, where[n], ", ".join(d.name for d in _of(n, group, devices)), f"{rates[n].rate / 1e9:.1f}")
        for n, name in enumerate(group.names)
    ]
    out.print(table("hosts", ("host", "interface and ports", "devices", "GB/s"), rows))
    rows = [
        (group.names[node], size(nbytes), f"{1e6 * s:.0f}", f"{nbytes / s / 1e9:.2f}")
        for node, seconds in times.items()
        for nbytes, s in zip(SIZES, seconds, strict=True)
    ]
    out.print(table("exchanges with node 0", ("node", "bytes", "us", "GB/s each way"), rows))
    if model:
        exchange = max(seconds[SIZES.index(EXCHANGE_NBYTES)] for seconds in times.values())
        _advise(model, rates, exchange)
    for device in devices:
        device.close()
    return 0


def _of(node: int, group: Group, devices: list[Device]) -> list[Device]:
    return [device for d, device in enumerate(devices) if group.nodes.of[d] == node]


def _rates(node: int, group: Group, devices: list[Device]) -> NodeRates:
    local = _of(node, group, devices)
    free = [device.free_nbytes() for device in local]
    known = [nbytes for nbytes in free if nbytes is not None]
    whole = sum(known) if len(known) == len(free) else None
    return NodeRates(sum(measure_speed(device).weights for device in local), whole)


def _advise(path: str, rates: list[NodeRates], exchange_s: float) -> None:
    out = console()
    with GGUF.open(path) as gguf:
        model = load_model(gguf)
        nbytes = sum(gguf.data(name).nbytes for name in gguf.tensors)
    at_work = [node for node in rates if node.rate]
    choices = placements(nbytes, model.n_layer, at_work, exchange_s, exchange_s)
    rows = [(host.name, f"{1 / host.seconds:.1f}", str(host.n_exchanges)) for host in choices]
    out.print(table("one sequence", ("placement", "tokens/s at most", "exchanges"), rows))
    out.print(advice(nbytes, model.n_layer, at_work, exchange_s))


if __name__ == "__main__":
    run_rank(main)
