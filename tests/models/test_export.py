"""An export of a loaded model equals the original file byte for byte, for every split."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import covering
from gguf_files import F32, STRING, U32, array, gguf_bytes, key, tensor
from runners import load_runner

from vkbackend.errors import GGUFError, InvalidArgument
from vkbackend.meta.gather import gather
from vkbackend.models.export import write_gguf
from vkbackend.models.gguf.reader import GGUF
from vkbackend.tools.cli import main

N_EMBD, N_FF, N_VOCAB = 64, 96, 32
SPLITS = [pytest.param(n, split, id=str(n)) for n, split in ((1, None), (2, [3, 1]), (3, None))]

PLACED = [
    pytest.param(n, options, id=f"{n}-{options}")
    for n, options in (
        (3, {}),
        (8, {}),  # several devices share each KV head
        (2, {"n_gpu_layers": 2}),
        (3, {"split_mode": "layer"}),
        (3, {"override_tensor": (("ffn", "CPU"),)}),
    )
]


def tensors_of(layers: range, *, output: bool = False, rope: bool = False) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    if 0 in layers:
        shapes |= {"token_embd.weight": (N_VOCAB, N_EMBD), "output_norm.weight": (N_EMBD,)}
    if rope:
        shapes["rope_freqs.weight"] = (16,)
    for il in layers:
        matrices = {
            "attn_norm": (N_EMBD,), "attn_q": (N_EMBD, N_EMBD), "attn_k": (32, N_EMBD),
            "attn_v": (32, N_EMBD), "attn_output": (N_EMBD, N_EMBD), "ffn_norm": (N_EMBD,),
            "ffn_gate": (N_FF, N_EMBD), "ffn_up": (N_FF, N_EMBD), "ffn_down": (N_EMBD, N_FF),
        }  # fmt: skip
        shapes |= {f"blk.{il}.{name}.weight": shape for name, shape in matrices.items()}
    return shapes | ({"output.weight": (N_VOCAB, N_EMBD)} if output else {})


def file_of(
    shapes: dict[str, tuple[int, ...]], *, keys: list[bytes], align: int = 32, seed: int = 0
) -> bytes:
    rng, rows, data = np.random.default_rng(seed), [], b""
    for name, shape in shapes.items():
        data += bytes(-len(data) % align)
        rows.append(tensor(name, tuple(reversed(shape)), 0, len(data)))
        data += rng.normal(0, 0.1, shape).astype("<f4").tobytes()
    return gguf_bytes(keys, rows, data + bytes(-len(data) % align), align=align)


def hyper_parameters(n_layer: int) -> list[bytes]:
    counts = {
        "block_count": n_layer, "embedding_length": N_EMBD, "context_length": 64, "feed_forward_length": N_FF,
        "attention.head_count": 2, "attention.head_count_kv": 1,
    }  # fmt: skip
    return [
        key("general.architecture", STRING, "llama"),
        *(key(f"llama.{name}", U32, value) for name, value in counts.items()),
        key("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
        array("tokenizer.ggml.tokens", STRING, ["a", "b\u2581", ""]),
        array("odd.floats", F32, [1.5, float("nan")]),
    ]


def written_back(
    path: Path, out: Path, devices: list[str], split: list[int] | None = None, **options: Any
) -> bytes:
    runner = load_runner(path, devices=devices, tensor_split=split, n_ctx=32, n_ubatch=1, **options)
    try:
        with GGUF.open(path) as source:
            total = write_gguf(out, source, runner.mesh.devices, runner.mesh.weights, runner.model.weights())
            if "output.weight" in runner.mesh.weights:
                tied = source.data(
                    "output.weight" if "output.weight" in source.tensors else "token_embd.weight"
                )
                assert np.array_equal(gather(runner.mesh.devices, runner.mesh.weights["output.weight"]), tied)
        content = out.read_bytes()
        assert len(content) == total
        return content
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("name", "n", "split"), covering([f"stories-narrow-{t}" for t in ("F32", "F16", "Q8_0", "Q4_0")], SPLITS)
)
def test_tied(models: Path, tmp_path: Path, name: str, n: int, split: list[int] | None) -> None:
    path = models / f"{name}.gguf"
    assert written_back(path, tmp_path / "out.gguf", ["numpy"] * n, split) == path.read_bytes()


@pytest.mark.parametrize(("name", "n", "split"), covering(["wide-F16", "wide-Q8_0", "wide-Q4_0"], SPLITS))
def test_untied(models: Path, tmp_path: Path, name: str, n: int, split: list[int] | None) -> None:
    path = models / f"stories-{name}.gguf"
    assert written_back(path, tmp_path / "out.gguf", ["numpy"] * n, split) == path.read_bytes()


@pytest.mark.parametrize(("n", "options", "name"), covering(PLACED, ["qwen2-Q8_0", "moe8x-Q4_0"]))
def test_biases_experts_and_placement(
    models: Path, tmp_path: Path, name: str, n: int, options: dict[str, Any]
) -> None:
    path = models / f"stories-{name}.gguf"
    assert written_back(path, tmp_path / "out.gguf", ["numpy"] * n, **options) == path.read_bytes()


@pytest.mark.parametrize(("n", "split"), SPLITS)
@pytest.mark.parametrize("align", [32, 256])
def test_untied_f32_with_rope_factors(tmp_path: Path, n: int, split: list[int] | None, align: int) -> None:
    path = tmp_path / "in.gguf"
    keys = [*hyper_parameters(2), *([key("general.alignment", U32, align)] if align != 32 else [])]
    raw = file_of(tensors_of(range(2), output=True, rope=True), keys=keys, align=align)
    path.write_bytes(raw)
    assert written_back(path, tmp_path / "out.gguf", ["numpy"] * n, split) == raw


def test_on_a_driver(models: Path, tmp_path: Path, device: Any) -> None:
    path = models / "stories-narrow-Q4_0.gguf"
    index = str(device.info.index)
    assert written_back(path, tmp_path / "out.gguf", [index] * 3, [5, 3, 2]) == path.read_bytes()


def test_parts_become_one_file(tmp_path: Path) -> None:
    parts = [tensors_of(range(0, 1)), tensors_of(range(1, 2), output=True)]
    total = sum(map(len, parts))
    for no, shapes in enumerate(parts):
        split_keys = [
            key("split.no", 2, no), key("split.count", 2, 2), key("split.tensors.count", 5, total),
        ]  # fmt: skip
        keys = [*(hyper_parameters(2) if no == 0 else []), *split_keys]
        (tmp_path / f"m-{no + 1:05d}-of-00002.gguf").write_bytes(file_of(shapes, keys=keys, seed=no))
    path = tmp_path / "m-00001-of-00002.gguf"
    written_back(path, tmp_path / "out.gguf", ["numpy"] * 2)
    with GGUF.open(path) as source, GGUF.open(tmp_path / "out.gguf") as copy:
        assert list(copy.metadata) == [k for k in source.metadata if not k.startswith("split.")]
        assert all(copy.metadata.stored(k) == source.metadata.stored(k) for k in copy.metadata)
        assert list(copy.tensors) == list(source.tensors)
        for name, info in copy.tensors.items():
            assert (info.type, info.shape) == (source.tensors[name].type, source.tensors[name].shape)
            assert np.array_equal(copy.data(name), source.data(name))


def test_the_bytes_come_from_the_devices(models: Path, tmp_path: Path) -> None:
    path, out = models / "stories-narrow-Q8_0.gguf", tmp_path / "out.gguf"
    runner = load_runner(path, devices=["numpy"] * 2, n_ctx=32, n_ubatch=1)
    try:
        (_, view), *_ = runner.mesh.weights["blk.2.ffn_down.weight"].pieces[1]
        held = runner.mesh.devices[1].read(view)
        held[0] ^= 255
        runner.mesh.devices[1].write(view, held)
        with GGUF.open(path) as source:
            write_gguf(out, source, runner.mesh.devices, runner.mesh.weights, runner.model.weights())
            info = source.tensors["blk.2.ffn_down.weight"]
            raw = path.read_bytes()
        begin = runner.mesh.weights[info.name].state.ranges[1][0]
        changed = [i for i, (a, b) in enumerate(zip(out.read_bytes(), raw, strict=True)) if a != b]
        row_bytes = info.nbytes // info.shape[0]
        assert changed == [info.offset + begin * row_bytes // info.shape[1]]
    finally:
        runner.close()


def test_refusals(models: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "in.gguf", tmp_path / "out.gguf"
    path.write_bytes((models / "stories-narrow-Q4_0.gguf").read_bytes())
    runner = load_runner(path, devices=["numpy"], n_ctx=32, n_ubatch=1)
    devices, weights = runner.mesh.devices, dict(runner.mesh.weights)
    specs = runner.model.weights()
    try:
        with GGUF.open(path) as source:
            link = tmp_path / "link.gguf"
            os.link(path, link)
            for same in (path, link):
                with pytest.raises(InvalidArgument, match="is the model that was loaded"):
                    write_gguf(same, source, devices, weights, specs)
            with pytest.raises(GGUFError, match="cannot be written"):
                write_gguf(tmp_path / "no" / "out.gguf", source, devices, weights, specs)
            out.write_bytes(b"old")

            def stop(done: int, total: int) -> None:
                if done > total // 2:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                write_gguf(out, source, devices, weights, specs, stop)
            del weights["blk.0.attn_q.weight"]
            with pytest.raises(GGUFError, match=r"blk\.0\.attn_q\.weight .* the devices hold nothing of it"):
                write_gguf(out, source, devices, weights, specs)
            assert out.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 3
    finally:
        runner.close()


def test_command(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = models / "stories-narrow-Q4_0.gguf", tmp_path / "out.gguf"
    args = ["export", "-m", str(path), "-o", str(out), "-dev", "numpy,numpy", "-ts", "3,1", "-ngl", "1"]
    assert main(args) == 0
    size = f"{path.stat().st_size / 1024:.1f} KiB"
    assert f"47 tensors, {size}, from numpy.0, numpy.1" in capsys.readouterr().out
    assert out.read_bytes() == path.read_bytes()
    assert main(["export", "-m", str(path), "-o", str(path), "-dev", "numpy"]) == 2
    assert "is the model that was loaded" in capsys.readouterr().err
    assert main(["export", "-m", str(path), "-o", "/nowhere/x.gguf", "-dev", "no such device"]) == 2
    assert "/nowhere is not a folder" in capsys.readouterr().err


def test_the_header_follows_the_format(tmp_path: Path) -> None:
    path = tmp_path / "in.gguf"
    shapes = tensors_of(range(1))
    raw = bytearray(file_of(shapes, keys=hyper_parameters(1)))
    raw[4:8] = struct.pack("<I", 2)
    path.write_bytes(raw)
    got = written_back(path, tmp_path / "out.gguf", ["numpy"])
    assert struct.unpack("<4sIQQ", got[:24]) == (b"GGUF", 3, len(shapes), 10) and got[8:] == raw[8:]
