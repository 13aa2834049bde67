"""`vkbackend hosts` reports errors and gives advice according to docs/hosts.md. The commands of `vkbackend
hosts` run over network namespaces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import namespaces
import pytest
import slow_link
from places import ROOT
from tiny_models import Tiny, write_tiny

from vkbackend.tools import cli
from vkbackend.tools.measure.node_advice import NodeRates, advice, break_even_s, placements

DEMO = ROOT / "models" / "demo" / "demo.gguf"


@pytest.mark.no_vulkan
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--hostfile", "none", "--", "generate"], "hostfile none: cannot be read"),
        (["run", "--hostfile", "none", "--", "export", "-m", "x"], "got 'export'"),
        (["run", "--hostfile", "none"], "got 'nothing'"),
        (["check", "--hostfile", "none", "--", "generate"], "takes no command"),
    ],
)
def test_refusals(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["hosts", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.no_vulkan
def test_commands_for_host_0_print_how_to_run_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "-m", str(DEMO), "--hostfile", str(tmp_path)]) == 2
    assert f"vkbackend hosts run --hostfile {tmp_path} -- COMMAND" in capsys.readouterr().err


GB = 1e9
DENSE_70B = 39 * GB, 80  # bytes at 4.5 bits, layers
ONE_500 = [NodeRates(350 * GB, None)] * 2


@pytest.mark.no_vulkan
def test_break_even_equals_the_table() -> None:
    assert 1e6 * break_even_s(int(DENSE_70B[0]), 80, ONE_500) == pytest.approx(323, rel=0.05)


@pytest.mark.no_vulkan
def test_advice_follows_the_network() -> None:
    nbytes, layers = int(DENSE_70B[0]), DENSE_70B[1]
    small = [NodeRates(350 * GB, int(24 * GB))] * 2
    assert advice(nbytes, layers, small, 60e-6).startswith("tensor parallel over all hosts")
    assert advice(nbytes, layers, small, 600e-6).startswith("whole layers on each host")
    large = [NodeRates(350 * GB, int(80 * GB))] * 2
    assert "run one server per host" in advice(nbytes, layers, large, 600e-6)
    assert "one sooner answer" in advice(nbytes, layers, large, 60e-6)


@pytest.mark.no_vulkan
def test_possible_placements() -> None:
    nbytes, layers = int(DENSE_70B[0]), DENSE_70B[1]
    tight = [NodeRates(350 * GB, int(24 * GB))] * 2
    names = [placement.name for placement in placements(nbytes, layers, tight, 60e-6, 60e-6)]
    assert names == ["tensor", "hosts"]
    every = placements(nbytes, layers, ONE_500, 60e-6, 60e-6)
    assert [placement.name for placement in every] == ["replicas", "tensor", "hosts"]
    assert [placement.n_exchanges for placement in every] == [0, 160, 1]
    # docs/hosts.md lists 14 tokens/s for 25 GbE
    assert 1 / every[1].seconds == pytest.approx(14, rel=0.1)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[namespaces.Net]:
    pytest.importorskip("mpi4py")
    if why := namespaces.unavailable():
        pytest.skip(why)
    with namespaces.hosts(2, tmp_path_factory.mktemp("net")) as network:
        yield network


def called(net: namespaces.Net, *words: str) -> str:
    command = str(Path(sys.executable).parent / "vkbackend")
    done = subprocess.run(
        net.command(0, command, "hosts", *words),
        env=os.environ | {"UCX_TLS": "tcp,self", "MPIR_CVAR_NOLOCAL": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not net.processes()
    return done.stdout


DEVICES = ["numpy", "numpy"]


def exchange_us(text: str) -> float:
    return float(next(line for line in text.splitlines() if "16.0 KiB" in line).split("KiB")[1].split()[0])


def test_check(net: namespaces.Net, tmp_path: Path) -> None:
    output = called(net, "check", "--hostfile", str(net.hostfile(tmp_path / "a", DEVICES)))
    assert "node 1 (10.213.77.2)" in output and "eth0, listens on" in output and "10.213.77.1:" in output


@pytest.mark.wide
def test_check_sees_a_slow_network(net: namespaces.Net, tmp_path: Path) -> None:
    path = str(write_tiny(tmp_path / "model.gguf", Tiny("llama", n_layer=1, n_embd=256, n_vocab=1024)))
    quick = called(net, "check", "--hostfile", str(net.hostfile(tmp_path / "a", DEVICES)), "-m", path)
    if not slow_link.can_slow():
        pytest.skip("there are no tap devices (/dev/net/tun)")
    with slow_link.slow_link(net.names, 0.025) as addresses:
        lines = [f"{address} dev=numpy" for address in addresses]
        (tmp_path / "b").write_text("\n".join([f"launcher={net.launcher}", *lines]) + "\n", encoding="utf-8")
        slow = called(net, "check", "--hostfile", str(tmp_path / "b"), "-m", path)
    assert "slow0, listens on" in slow
    assert exchange_us(slow) >= 25_000 > exchange_us(quick)
    assert "one sooner answer" in quick and "one sooner answer" not in slow, (quick, slow)


@pytest.mark.wide
def test_plan(net: namespaces.Net, tmp_path: Path) -> None:
    hostfile = str(net.hostfile(tmp_path / "hosts", ["numpy", "numpy,numpy"]))
    output = called(net, "run", "--hostfile", hostfile, "--", "plan", "-m", str(DEMO), "-ts", "2,1,1")
    assert "node 1 (10.213.77.2)/numpy.1" in output and "reduces" in output


@pytest.mark.wide
def test_reduces_and_their_network(net: namespaces.Net, tmp_path: Path) -> None:
    hostfile = str(net.hostfile(tmp_path / "hosts", ["numpy", "numpy"]))
    words = [
        "bench-reduce",
        "--sizes",
        "4K,64K",
        "--wires",
        "f32,f16",
        "--ahead",
        "all",
        "-r",
        "2",
        "-o",
        "json",
    ]
    rows = json.loads(called(net, "run", "--hostfile", hostfile, "--", *words))
    assert len(rows) == 3 * 2 * 2 and all(row["exact"] for row in rows)
    assert all(0 < row["us_network"] < row["us_max"] for row in rows)


@pytest.mark.wide
@pytest.mark.native
def test_reduces_by_events(net: namespaces.Net, tmp_path: Path) -> None:
    """All nodes leave out the same rows: events need sums that the host writes."""
    hostfile = str(net.hostfile(tmp_path / "hosts", ["0", "0"]))
    words = ["bench-reduce", "--sizes", "4K", "--wires", "f32", "-r", "2", "-o", "json"]
    words += ["--signals", "semaphore,event", "--ahead", "2"]
    rows = json.loads(called(net, "run", "--hostfile", hostfile, "--", *words))
    ways = [(row["provider"], row["signal"]) for row in rows]
    assert ways == [*((p, "semaphore") for p in ("pages", "scatter", "host-sum")), ("host-sum", "event")]
    assert all(row["exact"] for row in rows)


@pytest.mark.wide
def test_a_server_starts_a_new_group(net: namespaces.Net, tmp_path: Path) -> None:
    hostfile = str(net.hostfile(tmp_path / "hosts", ["numpy", "numpy"]))
    words = [
        "hosts",
        "run",
        "--hostfile",
        hostfile,
        "--",
        "serve",
        "-m",
        str(DEMO),
        "-ts",
        "1,1",
        "--port",
        "8099",
    ]
    server = subprocess.Popen(
        net.command(0, str(Path(sys.executable).parent / "vkbackend"), *words),
        env=os.environ | {"UCX_TLS": "tcp,self", "MPIR_CVAR_NOLOCAL": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    body = '{"prompt": "Once upon", "max_tokens": 4, "temperature": 0}'
    ask = ["curl", "-s", "-m", "20", "-d", body, "http://127.0.0.1:8099/v1/completions"]

    def answer(seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            reply = subprocess.run(
                net.command(0, *ask), capture_output=True, text=True, encoding="utf-8", check=False
            )
            if '"text"' in reply.stdout:
                return str(json.loads(reply.stdout)["choices"][0]["text"])
            time.sleep(0.3)
        raise AssertionError("no answer")

    try:
        want = answer(60)
        os.kill(net.ranks()[1], signal.SIGKILL)
        time.sleep(0.5)
        assert answer(60) == want and len(net.ranks()) == 2
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    finally:
        server.kill()
        server.wait()
    deadline = time.monotonic() + 20
    while net.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not net.processes()


@pytest.mark.wide
def test_bench_in_the_process_of_host_0(net: namespaces.Net, tmp_path: Path) -> None:
    hostfile = str(net.hostfile(tmp_path / "hosts", ["numpy", "numpy"]))
    words = ["bench", "-m", str(DEMO), "-p", "4", "-n", "2", "-r", "1", "-ts", "1,1"]
    assert "tg" in called(net, "run", "--hostfile", hostfile, "--", *words)


@pytest.mark.wide
def test_commands_that_the_user_starts(net: namespaces.Net, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    lines = [f"{net.address(n)} dev=numpy" for n in range(2)]
    hostfile.write_text("\n".join(["launcher=manual", *lines]) + "\n", encoding="utf-8")
    words = ["generate", "-m", str(DEMO), "-p", "Once", "-n", "2", "-ts", "1,1"]
    over = ["hosts", "run", "--hostfile", str(hostfile), "--", *words]
    main = subprocess.Popen(
        net.command(0, str(Path(sys.executable).parent / "vkbackend"), *over),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        env=os.environ | {"UCX_TLS": "tcp,self", "MPIR_CVAR_NOLOCAL": "1"},
    )
    typed = []
    assert main.stderr is not None
    for line in main.stderr:
        if line.startswith("  /"):
            command = net.command(len(typed), "sh", "-c", line.strip())
            typed.append(subprocess.Popen(command, env={"PATH": os.environ["PATH"]}))
    assert main.wait(60) == 0 and [process.wait(20) for process in typed] == [0, 0]
    main.stderr.close()


@pytest.mark.wide
def test_generate(net: namespaces.Net, tmp_path: Path) -> None:
    hostfile = str(net.hostfile(tmp_path / "hosts", ["numpy", "numpy"]))
    words = ["generate", "-m", str(DEMO), "-p", "Once", "-n", "4", "--temp", "0", "-ts", "1,1"]
    over = called(net, "run", "--hostfile", hostfile, "--", *words)
    alone = subprocess.run(
        [sys.executable, "-m", "vkbackend", *words, "-dev", "numpy,numpy"], capture_output=True,
        encoding="utf-8",
        timeout=100, check=True,
    )  # fmt: skip
    assert over == alone.stdout
