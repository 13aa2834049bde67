"""Random invalid bodies, sent to every endpoint, never cause a 500 or a leak."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz.bodies import BODIES, body_of
from fuzz.requests import Client, body_command, is_idle
from serving import Command, until

pytestmark = pytest.mark.no_vulkan

N, N_ALL = 12, 10_000
MOST = 500  # One in 14 bodies of /completion is valid.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    command = body_command(Path(tmp_path_factory.mktemp("slots")))
    yield command
    assert command.end() == 0, command.log
    assert not [line for line in command.log if "bug of this server" in line], command.log


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("path", list(BODIES))
def test_never_a_500(server: Command, path: str, request: pytest.FixtureRequest) -> None:
    n, seed = N_ALL if request.config.getoption("--all") else N, random.randrange(1 << 30)
    rng = random.Random(seed)
    client, statuses, sent = Client(server.address.port), set(), 0
    if path.startswith("/slots"):  # an empty slot cannot be saved, so the slot needs a text
        assert client.status("/completion", b'{"prompt": "a b", "id_slot": 0}') == 200
    # Some bodies must be valid and some invalid. All bodies of /infill fail, because no test model has infill
    # tokens.
    while sent < n or (len(statuses) < 2 and path != "/infill" and sent < MOST):
        sent += 1
        body = body_of(rng, BODIES[path])
        try:
            statuses.add(client.status(path, body))
        except Exception as error:
            raise AssertionError((seed, body, server.log[-5:])) from error
    client.close()
    assert len(statuses) > 1 or path == "/infill", statuses
    until(lambda: is_idle(server.address))
