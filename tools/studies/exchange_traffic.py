"""Count the bytes that a recorded step moves over the devices' buses, and that its host adds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from vkbackend.buffer import Buffer, View
from vkbackend.meta.copied_slots import CopiedSlots
from vkbackend.meta.host_sum import HostSum
from vkbackend.meta.mesh import Mesh
from vkbackend.meta.recorded_steps import Step
from vkbackend.meta.reduce import Provider, Reduce
from vkbackend.meta.ways import BySize
from vkbackend.recording import HOST_HOMES, Access, Copy, Dispatch
from vkbackend.wire import wire_words


def traffic(mesh: Mesh, step: Step) -> Counter[str]:
    """Return the bytes that all devices read from host memory and write to it, and the bytes that the host
    reads and writes to add shares. The bytes of StepParams do not count."""
    params = [inputs.host.buffer for inputs in mesh.inputs]
    nbytes: Counter[str] = Counter()
    for executable in step.executables:
        for access in executable.recording.accesses():
            if not isinstance(access, Copy) or access.src.buffer not in params:
                nbytes.update(moved(access))
    assert mesh.provider
    for reduce in step.reduces:
        if reduce:
            nbytes.update(of_provider(mesh.provider, reduce))
    return nbytes


def moved(access: Access) -> Counter[str]:
    """Return the bytes of host memory that a command reads and writes."""
    if isinstance(access, Copy):
        return Counter(read=in_host([access.src]), written=in_host([access.dst]))
    written = in_host([access.args[i] for i in access.written])
    if access.op == "add_partials":
        return Counter(read=shares_read(access), written=written)
    read = [view for i, view in enumerate(access.args) if i not in access.written]
    return Counter(read=in_host(read), written=written)


def in_host(views: Sequence[View]) -> int:
    # add_partials without a norm binds its result twice.
    return sum(v.nbytes for v in set(views) if isinstance(v.buffer, Buffer) and v.buffer.home in HOST_HOMES)


def shares_read(dispatch: Dispatch) -> int:
    """Return the number of bytes of the other devices' shares, because the view of all slots has gaps."""
    push, (_, own, slots, *_) = dict(dispatch.push), dispatch.args
    if not in_host([slots]):
        return 0
    writers = int(push["writers"])
    if own.buffer is not slots.buffer:
        writers &= ~(1 << int(push["own_index"]))
    n_words = (slots.nbytes // 4) - (int(push["n_slots"]) - 1) * int(push["slot_stride"])
    return writers.bit_count() * 4 * n_words


def of_provider(provider: Provider, reduce: Reduce) -> Counter[str]:
    """Return the bytes that an exchange moves besides the recorded commands."""
    if isinstance(provider, BySize):
        return of_provider(provider.of(reduce), reduce)
    share, n_read = 4 * wire_words(reduce.wire, reduce.elements), len(reduce.readers)
    if isinstance(provider, HostSum):
        added, spread = share * len(reduce.writers), 4 * reduce.elements * n_read
        return Counter({"host read": added, "host written": spread})
    if isinstance(provider, CopiedSlots):
        others = sum(len([w for w in reduce.writers if w != d]) for d in reduce.readers)
        return Counter(written=share * len(reduce.writers), read=share * others)
    return Counter()
