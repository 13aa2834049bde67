"""A crash or hang in gpu-report affects only one case. No file identifies the user, and every part fills its
table."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from pathlib import Path

import pytest
from device_sets import device_infos

from vkbackend.errors import OutOfDeviceMemory, UnsupportedFeature
from vkbackend.limits import Limits
from vkbackend.meta.host_memory import HostRates
from vkbackend.meta.host_sum import HostSum
from vkbackend.tools import cli
from vkbackend.tools.measure import matrix_times, synthetic
from vkbackend.tools.op_cases.matrix import MatVec
from vkbackend.tools.op_cases.rows import Add, Rope, Scale
from vkbackend.tools.report import checks, children, document, host_memory, op_times, rates, reduces
from vkbackend.tools.report.children import Job, Outcome, deal, run_job
from vkbackend.tools.report.document import NAME, Report
from vkbackend.tools.report.host_memory import HostMemory
from vkbackend.tools.report.part import LeftOut
from vkbackend.tools.report.parts import PARTS

needs_device = pytest.mark.skipif(not device_infos(), reason="no Vulkan device is present")
TINY = ("llama", 256, True, synthetic._dense(2, 64, 4, 2, 32, 96))

WORKER = """
import json, os, signal, sys, time
job = json.loads(sys.stdin.readline())
def tell(**message):
    print(json.dumps(message), flush=True)
tell(cases=["good", "crash", "hang", "lost", "left", "last"])
for name in ["good", "crash", "hang", "lost", "left", "last"]:
    if name in job["done"]:
        continue
    tell(begin=name)
    if name == "crash":
        sys.stderr.write("the driver said this\\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hang":
        time.sleep(600)
    if name == "lost":
        tell(end=name, rows=[], failed="device lost", lost=True)
        break
    if name == "left":
        tell(end=name, rows=[], left_out="too large")
        continue
    tell(end=name, rows=[{"case": name, "seen": len(job["rows"])}])
"""


def job(folder: Path, *, deadline_s: float = 5.0, seconds: float = 1e6) -> Job:
    return Job("verify", ("0",), time.monotonic() + seconds, deadline_s, {}, folder)


def workers(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "worker.py"
    path.write_text(script, encoding="utf-8")
    monkeypatch.setattr(children, "WORKER", (sys.executable, str(path)))


def test_a_crash_a_hang_and_a_loss_each_cost_one_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers(WORKER, tmp_path, monkeypatch)
    begun: list[str] = []
    result = run_job(job(tmp_path), lambda case, done, n: begun.append(case))
    assert result.rows == [{"case": "good", "seen": 0}, {"case": "last", "seen": 1}]
    assert begun == result.done == ["good", "crash", "hang", "lost", "left", "last"]
    assert not result.unfinished and result.left_out == [("left", "too large")]
    crash, hang, lost = result.failed
    assert result.n_late == 1
    words = Report(1.0, "2026-01-01", parts={"tune": [result]}).plain_words()
    assert words[0] == "2 checks failed or gave wrong results. Do not trust this driver."
    assert words[1].startswith("1 check did not end in time. Either a device hangs, or the machine was busy")
    assert crash == ("crash", "the process ended with signal SIGSEGV: the driver said this")
    assert hang == ("hang", "did not end within 5 s") and lost == ("lost", "device lost")


def test_a_report_without_results_does_not_claim_that_checks_passed() -> None:
    assert Report(1.0, "2026-01-01").plain_words()[0] == "No check has ended."
    unfinished = children.Outcome(("0",), unfinished="the time was over")
    assert Report(1.0, "2026-01-01", parts={"tune": [unfinished]}).plain_words()[0] == "No check has ended."


def test_a_device_that_is_lost_repeatedly_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = WORKER.replace('["good", "crash", "hang", "lost", "left", "last"]', "list('abcdefghij')")
    workers(script.replace('name == "crash"', "True"), tmp_path, monkeypatch)
    result = run_job(job(tmp_path), lambda *_: None)
    assert len(result.failed) == children.MAX_LOSSES and "given up" in result.unfinished


def test_a_part_ends_with_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers(WORKER, tmp_path, monkeypatch)
    result = run_job(job(tmp_path, seconds=-1.0), lambda *_: None)
    assert not result.cases and result.unfinished == "no time was left for it"
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    result = run_job(Job("verify", ("0",), 1.0, 5.0, {}, tmp_path), lambda *_: clock.append(clock.pop() + 9))
    assert result.unfinished == "1 of 6 cases were done in its time" and result.done == ["good"]


def test_a_part_that_cannot_start_reports_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers('print(\'{"unable": "no such thing"}\')', tmp_path, monkeypatch)
    assert run_job(job(tmp_path), lambda *_: None).unfinished == "no such thing"
    workers("raise SystemExit('broken')", tmp_path, monkeypatch)
    assert "exit code 1: broken" in run_job(job(tmp_path), lambda *_: None).unfinished


def test_shares_add_up_to_all_of_the_time() -> None:
    ends = deal([part.share for part in PARTS.values()], 600.0, 1000.0)
    assert ends == sorted(ends) and ends[-1] == pytest.approx(1600.0) and ends[0] > 1000.0


def test_the_files_name_no_host_user_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "Bobs-Tower.lan")
    monkeypatch.setattr("getpass.getuser", lambda: "bob")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/bob"))
    document._private.cache_clear()
    said = "in /home/bob/x.gguf, ~/models/a and '/opt/vk/lib.so': bob@bobs-tower; 12 tokens/s of f16/q8_0"
    failed = Outcome(("0",), [], [("b", said)], [("a", said)], ["a", "b", "c"], ["a", "b"], said)
    try:
        report = Report(1.0, "2026-01-01", {"system": said}, [], {"verify": [failed]}, {"verify": 1.0})
        report.save(tmp_path / "out")
    finally:
        document._private.cache_clear()
    texts = [(tmp_path / "out" / (NAME + suffix)).read_text(encoding="utf-8") for suffix in (".json", ".md")]
    for text in texts:
        for private in ("bob", "Bobs", "tower", "/home", "/opt", "models/a", "x.gguf"):
            assert private not in text, private
        assert "12 tokens/s of f16/q8_0" in text
    value = json.loads(texts[0])
    assert value["parts"]["verify"][0]["done"] == 2 and len(value["unfinished"]) == len(PARTS)
    assert "- shapes: not begun" in texts[1] and "- Vulkan0, left out: b: in (path)," in texts[1]


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (r"C:\Users\Bob Smith\models\x.gguf: no such file", "(path): no such file"),
        (repr(r"C:\users\bob smith\x y"), "'(path) y'"),
        (r"in D:\models\a.gguf, e:/b and \\nas\share\c.gguf", "in (path), (path) and (path)"),
        (r"\\?\C:\models\a.gguf; \\?\UNC\nas\share\c", "(path); (path)"),
        (repr(r"\\?\D:\a\b") + repr(r"\\nas\share"), "'(path)''(path)'"),
        (r"C:\Users\Bob Smithson and /home/bob", "(path) Smithson and (path)"),
        (r"ratio 1:2, 12:30, http://host:80/v1, \d+ a\b", r"ratio 1:2, 12:30, http://host:80/v1, \d+ a\b"),
    ],
)
def test_paths_of_windows_are_replaced(text: str, clean: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path(r"C:\Users\Bob Smith"))
    monkeypatch.setattr("getpass.getuser", lambda: "nobody")
    document._private.cache_clear()
    try:
        assert document.scrubbed({"a": [text]}) == {"a": [clean]}
    finally:
        document._private.cache_clear()


def test_an_unwritable_folder_is_reported_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["gpu-report", "-o", str(tmp_path / "file" / "x")]) == 2
    assert "--output" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "named"),
    [(("--parts", "verify,soup"), "'soup'"), (("--minutes", "-1"), "-1"), (("-dev", "numpy"), "numpy")],
)
def test_bad_values_are_named(args: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gpu-report", *args]) == 2
    assert named in capsys.readouterr().err


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(synthetic.SHAPES, "tiny", TINY)
    monkeypatch.setattr(rates, "MODELS", ("tiny:Q4_0",) * 3)
    monkeypatch.setattr(rates, "DEPTHS", (0, 64))
    monkeypatch.setattr(rates, "BOX_S", 0.0)
    monkeypatch.setattr(rates, "N_PROMPT", 32)
    monkeypatch.setattr(checks, "SHAPES", ("tiny",))
    monkeypatch.setattr(checks, "TYPE", "Q4_0")
    monkeypatch.setattr(checks, "N_VOCAB", 256)
    monkeypatch.setattr(matrix_times, "TYPES", ("f32",))
    monkeypatch.setattr(matrix_times, "SHAPES", ((8, 32),))
    monkeypatch.setattr(op_times, "TYPES", ("f32",))
    monkeypatch.setattr(op_times, "EXPERT_TYPES", ())
    monkeypatch.setattr(op_times, "SOFTWARE_SIDE", 32)
    monkeypatch.setattr(op_times, "SIDE", 32)
    monkeypatch.setattr(op_times, "attention_cases", list)


def test_every_op_runs_once_before_any_runs_twice() -> None:
    cases = checks.in_turns([Add(1), Add(2), Rope(1, 2, 2, 1), Add(3), Scale(1), Scale(2)])
    assert [type(case) for case in cases] == [Add, Rope, Scale, Add, Scale, Add]


@needs_device
def test_a_wrong_op_is_reported() -> None:
    part = checks.Verify(("0",), [])
    [good, *_] = part.run(repr(Add(1)))
    assert good["shaders"] == ["add.f32"] and not checks.Verify.wrong(good)
    part.device.limits = Limits.floor()
    with pytest.raises(LeftOut, match="int_dot"):
        part.run(next(name for name in part.cases() if name.startswith("MatDot(")))
    part.close()
    broken = good | {"failure": "wrong", "nmse": 3.0}
    assert checks.Verify.wrong(broken) == f"{Add(1)!r}: wrong"
    _, lines = checks.Verify.columns([{"device": "Vulkan0", **row} for row in (good, broken)])
    assert lines == [("Vulkan0", "add", 2, 1, "3", f"{good['allowed']:.2g}")]


def test_logits_of_a_device_are_compared(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    part = checks.Shapes(("numpy",), [])
    rows = part.run(part.cases()[0])
    assert [row["ops"] for row in rows] == ["exact", "fast"] and not any(map(part.wrong, rows))
    true = checks.logits

    def wrong(spec: str, device: str, exact: bool) -> list:  # type: ignore[type-arg]
        true_logits = true(spec, device, exact)
        return true_logits if exact else [logits[::-1] for logits in true_logits]

    monkeypatch.setattr(checks, "logits", wrong)
    assert [bool(part.wrong(row)) for row in part.run(part.cases()[0])] == [False, True]


def test_ops_are_timed_and_ranked(tiny: None) -> None:
    part = op_times.Tune(("numpy",), [])
    for case in part.cases():
        part.rows += part.run(case)
    head, lines = part.columns([{"device": "numpy", **row} for row in part.rows])
    assert head[:3] == ("device", "rows", "op") and {line[1] for line in lines} == set(op_times.ROWS)
    part.rows.pop(0)
    with pytest.raises(LeftOut, match="1 of the cases"):
        part.run(op_times.RANKING)
    products = op_times.Products(("numpy",), [])
    assert products.cases()[:2] == [op_times.COPY, repr(MatVec("f32", 32, 32, 1))]
    [row] = products.run(products.cases()[1])
    assert row["% of copy"] > 0 and row["runs"] == "mat_vec.f32"


@pytest.mark.parametrize("devices", [pytest.param(("numpy",), marks=pytest.mark.wide), ("numpy", "numpy")])
def test_rates_at_every_depth(devices: tuple[str, ...], tiny: None) -> None:
    part = rates.Rates(devices, [])
    for case, depth in zip(part.cases()[:2], (0, 64), strict=True):
        [row] = part.run(case)
        assert row["depth"] == depth and row["layers"] == "all" and row["prompt"] == 32
        assert min(row["tg t/s"], row["pp t/s"], row["% of copy"]) > 0
        assert ("us/reduce" in row) == (len(devices) > 1)
        assert ("predicted t/s" in row) == (depth == 0)
        assert ("exchanges" in row) == (depth == 0 and len(devices) > 1)
        assert ("% of t/s in segments" in row) == (depth == 0 and len(devices) == 1)
    part.close()


def test_a_model_that_does_not_fit_is_made_smaller(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    true = rates.Runner

    def small(options, gguf):  # type: ignore[no-untyped-def]
        n_layer = gguf.metadata["llama.block_count"]
        asked.append((n_layer, options.n_ctx - rates.ROOM))
        if n_layer > 1 or options.n_ctx > rates.ROOM:
            raise OutOfDeviceMemory("too large")
        return true(options, gguf)

    monkeypatch.setattr(rates, "Runner", small)
    part = rates.Rates(("numpy",), [])
    [row] = part.run("tiny:Q4_0 after 0")
    assert asked == [(2, 64), (2, 0), (1, 64), (1, 0)] and row["layers"] == "1 of 2"
    with pytest.raises(LeftOut, match="too large"):
        part.run("tiny:Q4_0 after 64")
    part.close()


def test_reads_of_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HostMemory.groups(["0", "1", "2"])[3:] == [("0", "1"), ("0", "2"), ("1", "2")]
    rates = {"cached": HostRates(12e9, 24e9, 8e9, 20e9)}
    monkeypatch.setattr(host_memory, "measure_host_memory", lambda device: rates)
    monkeypatch.setattr(host_memory, "measure_pair", lambda first, second: (6e9, 7e9))
    part = HostMemory(("numpy",), [])
    [row] = [row for case in part.cases() for row in part.run(case)]
    assert (row["memory"], row["read GB/s"], row["copy with reads GB/s"]) == ("cached", 12, 20)
    pair = HostMemory(("numpy", "numpy"), [])
    [row] = [row for case in pair.cases() for row in pair.run(case)]
    assert (row["read GB/s"], row["of the second"]) == (13, 7)
    monkeypatch.setattr(host_memory, "measure_host_memory", lambda device: {})
    with pytest.raises(LeftOut, match="kinds"):
        part.run(part.cases()[0])


def test_pairs_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reduces.Reduces.groups(["0"]) == [("0", "0")]
    assert reduces.Reduces.groups(["0", "1", "2"]) == [("0", "1"), ("0", "2"), ("1", "2")]
    part = reduces.Reduces(("numpy", "numpy"), [])
    [row] = part.run("4K host-sum semaphore all")
    assert row["sums"] == "exact" and row["us"] > 0 and not part.wrong(row)
    monkeypatch.setattr(HostSum, "exchange", lambda self, reduce: None)
    [row] = part.run("4K host-sum semaphore 1")
    assert part.wrong(row)
    assert "16K visible semaphore one-call" in part.cases()
    [row] = part.run("4K host-sum semaphore one-call")
    assert row["sums"] == "WRONG" and not part.wrong(row)


@needs_device
def test_llama_bench_reads_the_same_model(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    part = rates.LlamaCpp(("0",), [])
    with pytest.raises(UnsupportedFeature, match="not installed"):
        part.cases()
    script = tmp_path / "llama-bench"
    script.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "args = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "assert open(args['-m'], 'rb').read(4) == b'GGUF'\n"
        "assert os.environ['GGML_VK_VISIBLE_DEVICES'].isdigit()\n"
        "print(json.dumps([{'n_prompt': int(args['-p']), 'n_gen': 0, 'n_depth': int(d), 'avg_ts': 7.5,\n"
        "    'build_commit': 'abc', 'build_number': 1} for d in args['-d'].split(',')]))\n",
        encoding="utf-8",
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    rows = part.run(part.cases()[0])
    assert [(row["test"], row["depth"], row["t/s"]) for row in rows] == [("pp32", 0, 7.5), ("pp32", 64, 7.5)]
    script.write_text(f"#!{sys.executable}\nraise SystemExit('no such device')\n", encoding="utf-8")
    with pytest.raises(UnsupportedFeature, match="no such device"):
        part.run(part.cases()[0])


@needs_device
def test_the_command_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gpu-report", "-dev", "0", "--parts", "verify,reduces", "--minutes", "0.01"]
    assert cli.main([*words, "-o", str(tmp_path / "out")]) == 0
    value = json.loads((tmp_path / "out" / f"{NAME}.json").read_text(encoding="utf-8"))
    assert value["devices"][0]["index"] == 0 and "uuid" not in value["devices"][0]
    [verified] = value["parts"]["verify"]
    assert 0 < verified["done"] < verified["cases"] and not verified["failed"]
    assert "cases were done in its time" in capsys.readouterr().out
    assert "## Every op against its numpy twin" in (tmp_path / "out" / f"{NAME}.md").read_text(
        encoding="utf-8"
    )


@needs_device
@pytest.mark.wide
def test_a_lost_device_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKBACKEND_FAULT", "Vulkan0:vkQueueSubmit:30:VK_ERROR_DEVICE_LOST")
    words = ["gpu-report", "-dev", "0", "--parts", "verify", "--minutes", "2"]
    assert cli.main([*words, "-o", str(tmp_path)]) == 1
    [verified] = json.loads((tmp_path / f"{NAME}.json").read_text(encoding="utf-8"))["parts"]["verify"]
    lost = [row for row in verified["rows"] if "was lost" in row["failure"]]
    assert len(lost) == children.MAX_LOSSES and verified["done"] > 4 * len(lost), verified["unfinished"]
    assert "given up" in verified["unfinished"]
    assert os.path.exists(tmp_path / f"{NAME}.md")
