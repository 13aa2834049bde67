"""The rows of every family equal the rows that transformers computes. A projector that does not match the
text model is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from device_sets import device_params, nmse, product, wide
from oracles import vision
from oracles.fixture import Fixture, write
from oracles.vision import BUILDERS, GRIDS, build, pixels_of
from places import GOLDEN
from vision_configs import SMALL, vision_config

from vkbackend.errors import GGUFError, InvalidArgument, UnsupportedModel
from vkbackend.hazards import check
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.vision.config import TokenLimits
from vkbackend.models.vision.patches import cut_patches
from vkbackend.models.vision.picture import Picture, Tile
from vkbackend.models.vision.preprocess.prepare import cut_of
from vkbackend.models.vision.projector import Projector
from vkbackend.models.vision.projector_plan import step_kind, step_rows
from vkbackend.models.vision.registry import FAMILIES, family

DEVICES = [
    pytest.param("numpy", id="numpy"),
    *(pytest.param(f"{of.values[0].index}", marks=of.marks, id=of.id) for of in device_params()[:1]),
    *(wide(pytest.param(f"{of.values[0].index}", marks=of.marks, id=of.id)) for of in device_params()[1:]),
]
# By default, the rows of these families are computed only on numpy.
ON_NUMPY = "minicpmv", "llama4", "glm4v", "kimivl", "kimik25"
ROWS = [
    wide(p) if p.values[0] in ON_NUMPY and p.values[1] != "numpy" else p for p in product(BUILDERS, DEVICES)
]
# Activations and sums are F32 on both sides.
BOUND = 1e-9
LIBMTMD_BOUND = 1e-6  # llama.cpp computes GELU with an F16 table
Q8_0_BOUND = 1e-3  # rounding a weight to 8 bits causes an error of up to 0.4 %


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("projectors")


@pytest.fixture(scope="module")
def golden() -> Iterator[Any]:
    with np.load(GOLDEN / "vision.npz") as arrays:
        yield dict(arrays)


def open_projector(models: Path, name: str, on: str, **options: Any) -> Projector:
    path = models / f"{name}.gguf"
    if not path.exists():
        write(build(name), path)
    return Projector.open(path, open_devices([on], exact=True)[0], **options)


def picture_of(name: str, projector: Projector) -> Picture:
    patch = projector.config.patch_side
    patches = cut_patches(pixels_of(name, patch), patch, projector.encoder.merge)
    return Picture(bytes(16), (Tile(patches, GRIDS[name]),), (0,))


@pytest.mark.parametrize(("name", "on"), ROWS)
def test_rows_equal_transformers(models: Path, golden: Any, name: str, on: str) -> None:
    with open_projector(models, name, on) as projector:
        [rows] = projector.encode(picture_of(name, projector))
        assert rows.n_rows == rows.grid[0] * rows.grid[1]
        assert nmse(rows.values, golden[name]) <= BOUND


def test_every_projector_type_has_a_fixture() -> None:
    keys = [build(name).keys for name in BUILDERS]
    assert {of.get("projector_type") or of["vision.projector_type"] for of in keys} == {*FAMILIES}


def written(name: str, path: Path, **changes: Any) -> Path:
    """Write a fixture with changed keys, and with the changed tensors in `tensors`. A value of None removes a
    key."""
    fixture = build(name)
    fixture.tensors |= changes.pop("tensors", {})
    fixture.keys |= changes
    fixture.keys = {key: value for key, value in fixture.keys.items() if value is not None}
    return write(fixture, path)


def open_file(path: Path, **options: Any) -> Projector:
    return Projector.open(path, open_devices(["numpy"])[0], **options)


@pytest.mark.oracle
@pytest.mark.parametrize("name", BUILDERS)
def test_transformers_computes_the_golden_rows(golden: Any, name: str) -> None:
    pytest.importorskip("transformers", reason="the extra oracles is not installed")
    from oracles import hf_vision

    assert nmse(hf_vision.ROWS[name](build(name)), golden[name]) <= 1e-12


@pytest.mark.oracle
@pytest.mark.parametrize("name", BUILDERS)
def test_libmtmd_computes_about_the_golden_rows(golden: Any, name: str) -> None:
    pytest.importorskip("xllamacpp", reason="the extra oracles is not installed")
    from oracles import libmtmd

    if name not in libmtmd.TEXTS:
        pytest.skip("libmtmd computes other rows (make_vision.py)")
    assert nmse(libmtmd.rows(build(name)), golden[name]) <= LIBMTMD_BOUND


# ---- other files of the same weights ----


def test_rows_of_a_quantized_projector(tmp_path: Path, golden: Any) -> None:
    """Only matrices whose rows consist of blocks are quantized, as in llama.cpp."""
    path = write(build("idefics3"), tmp_path / "q8.gguf", quantize=True)
    with GGUF.open(path) as file:
        assert {info.type for info in file.tensors.values()} == {"f32", "q8_0"}
    with open_file(path) as projector:
        [rows] = projector.encode(picture_of("idefics3", projector))
    assert 1e-9 < nmse(rows.values, golden["idefics3"]) <= Q8_0_BOUND


@pytest.mark.wide
@pytest.mark.parametrize(
    ("type_", "bound"), [("F16", 2e-6), ("BF16", 1e-4), ("Q8_0", Q8_0_BOUND), ("Q4_0", 0.1)]
)
@pytest.mark.parametrize("name", BUILDERS)
def test_rows_of_files_of_other_types(
    tmp_path: Path, golden: Any, name: str, type_: str, bound: float
) -> None:
    """Every matrix whose rows consist of blocks is quantized, except the table of positions."""
    fixture, type_of = build(name), gguf.GGMLQuantizationType[type_]
    block, _ = gguf.GGML_QUANT_SIZES[type_of]
    blocks = {
        tensor: (gguf.quants.quantize(values, type_of), type_of)
        for tensor, values in fixture.tensors.items()
        if values.ndim > 1 and values.shape[-1] % block == 0 and tensor != "v.position_embd.weight"
    }
    with open_file(write(fixture, tmp_path / "other.gguf", blocks=blocks)) as projector:
        [rows] = projector.encode(picture_of(name, projector))
    assert 1e-9 < nmse(rows.values, golden[name]) <= bound


@pytest.mark.parametrize(
    ("name", "on"),
    [p if p.id == "idefics3-numpy" else wide(p) for p in product(["idefics3", "pixtral"], DEVICES)],
)
def test_values_beyond_f16(tmp_path: Path, golden: Any, name: str, on: str) -> None:
    """q, v and the FFN's product are 131,072 times as large as usual. k, and the matrices that read v or the
    FFN's product, are smaller by the same factor."""
    fixture = build(name)
    factors = {"attn_q": 1, "attn_k": -1, "attn_v": 1, "attn_out": -1}
    if name == "pixtral":
        factors |= {"ffn_up": 1, "ffn_down": -1}
    for tensor, values in fixture.tensors.items():
        part, kind = tensor.split(".")[-2:]
        if part in factors and (kind == "weight" or part not in ("attn_out", "ffn_down")):
            fixture.tensors[tensor] = values * np.float32(2.0 ** (17 * factors[part]))
    path = write(fixture, tmp_path / "large.gguf")
    with Projector.open(path, open_devices([on], exact=True)[0]) as projector:
        [rows] = projector.encode(picture_of(name, projector))
    assert nmse(rows.values, golden[name]) <= BOUND


def with_heads(head_dim: int) -> Fixture:
    m, d = Fixture("idefics3", "clip"), 2 * head_dim
    vision.keys(m, "idefics3", image=96, n_layer=1, n_embd=d, n_head=2)
    m.keys |= {"use_gelu": True, "vision.projector.scale_factor": 3}
    vision.patches(m)
    m.put("v.position_embd.weight", m.normal("v.position_embd.weight", 36, d))
    vision.layers(m)
    vision.layer_norm(m, "v.post_ln", d)
    m.matrix("mm.model.fc", vision.TEXT_WIDTH, 9 * d)
    return m


@pytest.mark.oracle
@pytest.mark.parametrize("head_dim", [72, 80, 88])
@pytest.mark.parametrize("on", DEVICES)
def test_head_sizes_of_published_encoders(tmp_path: Path, head_dim: int, on: str) -> None:
    """A head has 72 values in SigLIP, 80 in Qwen2.5-VL and 88 in Llama 4. Matrix units of 16 x 16 divide only
    80, so attn_prefill computes the other sizes on every device."""
    pytest.importorskip("transformers", reason="the extra oracles is not installed")
    from oracles import hf_vision

    path = write(with_heads(head_dim), tmp_path / "heads.gguf")
    with Projector.open(path, open_devices([on], exact=True)[0]) as projector:
        [rows] = projector.encode(picture_of("idefics3", projector))
    assert nmse(rows.values, hf_vision.ROWS["idefics3"](with_heads(head_dim))) <= BOUND


def test_old_files_name_the_matrices_of_the_ffn_in_reverse(tmp_path: Path, golden: Any) -> None:
    fixture = build("gemma3")
    for il in range(3):
        up, down = (f"v.blk.{il}.ffn_{name}" for name in ("up", "down"))
        for kind in ("weight", "bias"):
            both = fixture.tensors.pop(f"{up}.{kind}"), fixture.tensors.pop(f"{down}.{kind}")
            fixture.tensors[f"{down}.{kind}"], fixture.tensors[f"{up}.{kind}"] = both
    with open_file(write(fixture, tmp_path / "old.gguf")) as projector:
        [rows] = projector.encode(picture_of("gemma3", projector))
    assert nmse(rows.values, golden["gemma3"]) <= BOUND


def test_tensors_of_sound_are_not_read(tmp_path: Path) -> None:
    sound = {"a.blk.0.ln1.weight": np.ones(8), "mm.a.fc.weight": np.ones((8, 8))}
    open_file(written("gemma4v", tmp_path / "both.gguf", tensors=sound)).close()


# ---- pictures one after the other ----


def test_rows_do_not_depend_on_earlier_pictures(models: Path, golden: Any) -> None:
    """A larger picture leaves values in rows that are padding for a smaller picture."""
    rng = np.random.default_rng(5)
    with open_projector(models, "qwen2.5vl", "numpy") as projector:
        grid = 26, 20
        large = rng.normal(size=(grid[0] * grid[1], 588)).astype(np.float32) * 100
        picture = picture_of("qwen2.5vl", projector)
        for tiles in ((Tile(large, grid), *picture.tiles), picture.tiles):
            *_, rows = projector.encode(Picture(bytes(16), tiles, ()))
            assert nmse(rows.values, golden["qwen2.5vl"]) <= BOUND
        assert rows.grid == (9, 6)


def test_tiles_of_a_picture_have_different_keys(models: Path) -> None:
    with open_projector(models, "idefics3", "numpy") as projector:
        [tile] = picture_of("idefics3", projector).tiles
        first, second = projector.encode(Picture(bytes(16), (tile, tile), (0, 1)))
        assert first.key != second.key and len(first.key) == 16
        np.testing.assert_array_equal(first.values, second.values)
        [same] = projector.encode(Picture(bytes(16), (tile,), (0,)))
        [other] = projector.encode(Picture(b"x" * 16, (tile,), (0,)))
        assert same.key == first.key != other.key


def test_steps_have_no_hazards(models: Path) -> None:
    for name in ("gemma4v", "qwen3vl", "internvl"):
        with open_projector(models, name, "numpy") as projector:
            kind = step_kind(projector.encoder, step_rows(projector.encoder, 16))
            [executable] = projector._mesh.recorded_step(kind).executables
            assert all(hazard.kind == "in-place" for hazard in check(executable.recording))


# ---- what is refused ----


@pytest.mark.parametrize(
    ("name", "changes", "error", "words"),
    [
        ("idefics3", {"projector_type": "ldpv2"}, UnsupportedModel, "'ldpv2' is not supported"),
        ("idefics3", {"projector_type": None}, GGUFError, "clip.projector_type"),
        ("idefics3", {"has_vision_encoder": False}, UnsupportedModel, "has_vision_encoder"),
        ("idefics3", {"vision.patch_size": 0}, GGUFError, "vision.patch_size"),
        ("idefics3", {"vision.patch_size": 15}, GGUFError, "image_size"),
        ("idefics3", {"vision.projector.scale_factor": 4}, GGUFError, "4 x 4 patches"),
        ("idefics3", {"vision.projector.scale_factor": 65}, GGUFError, "scale_factor"),
        ("idefics3", {"vision.attention.head_count": 5}, UnsupportedModel, "5 heads"),
        ("idefics3", {"vision.block_count": 1 << 30}, GGUFError, "block_count"),
        ("idefics3", {"vision.block_count": 4}, GGUFError, "v.blk.3."),
        ("idefics3", {"vision.block_count": 2}, UnsupportedModel, "tensors that clip does not use"),
        ("idefics3", {"vision.image_std": [0.5, 0.0, 0.5]}, GGUFError, "image_std"),
        ("idefics3", {"vision.image_mean": [0.5]}, GGUFError, "image_mean"),
        ("idefics3", {"tensors": {"v.position_embd.weight": np.full((36, 64), np.nan)}}, GGUFError, "finite"),
        ("idefics3", {"tensors": {"mm.model.fc.weight": np.ones((64, 48))}}, GGUFError, "mm.model.fc.weight"),
        ("qwen3vl", {"tensors": {"v.position_embd.weight": np.ones((63, 64))}}, GGUFError, "square table"),
        ("qwen3vl", {"vision.is_deepstack_layers": [False] * 5 + [True]}, GGUFError, "deepstack"),
        ("qwen2.5vl", {"vision.n_wa_pattern": 0}, GGUFError, "n_wa_pattern"),
        (
            "gemma3",
            {"tensors": {"mm.input_projection.weight": np.ones((64, 48))}},
            GGUFError,
            "input_projection",
        ),
        ("pixtral", {"tensors": {"v.token_embd.img_break": np.ones(47)}}, GGUFError, "IMG_BREAK"),
        (
            "pixtral+merger",
            {"tensors": {"mm.patch_merger.weight": np.ones((64, 64))}},
            GGUFError,
            "patch_merger",
        ),
        ("gemma4v", {"tensors": {"v.position_embd.weight": np.ones((24, 64))}}, GGUFError, "positions"),
        ("gemma4v", {"tensors": {"v.blk.0.attn_q.input_min": np.full(1, 9)}}, GGUFError, "v.blk.0.attn_q"),
        ("internvl", {"tensors": {"v.position_embd.weight": np.ones((16, 64))}}, GGUFError, "positions"),
        ("llava", {"vision.feature_layer": [1, 3]}, UnsupportedModel, "reads the layers [1, 3]"),
        ("llava", {"vision.image_grid_pinpoints": [64, 128]}, UnsupportedModel, "LLaVA 1.6"),
        ("minicpmv", {"tensors": {"resampler.ln_q.bias": np.ones(64)}}, GGUFError, "resampler.ln_q.bias"),
        ("minicpmv", {"tensors": {"resampler.proj.weight": np.ones((64, 128))}}, GGUFError, "heads of 128"),
        ("llava", {"tensors": {"v.post_ln.weight": np.ones(64)}}, UnsupportedModel, "v.post_ln"),
        ("glm4v", {"tensors": {"mm.patch_merger.weight": np.ones((64, 256))}}, GGUFError, "patch_merger"),
        ("llama4", {"tensors": {"mm.model.mlp.2.weight": np.ones((64, 80))}}, GGUFError, "mm.model.mlp.2"),
    ],
)
def test_wrong_projector_files(
    tmp_path: Path, name: str, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    tensors = {key: np.asarray(values, np.float32) for key, values in changes.get("tensors", {}).items()}
    path = written(name, tmp_path / "wrong.gguf", **{**changes, "tensors": tensors})
    with pytest.raises(error, match=re.escape(words)) as caught:
        open_file(path).close()
    assert "wrong.gguf" in str(caught.value)


def text_model(
    path: Path, arch: str = "llama", n_embd: int = 64, tokens: list[str] | None = None, **keys: int
) -> Path:
    words = {"tokenizer.ggml.tokens": tokens} if tokens else {}
    of_model: dict[str, Any] = {"embedding_length": n_embd, **keys, **words}
    return write(Fixture("text", arch, of_model, {"x": np.ones(1, np.float32)}), path)


@pytest.mark.parametrize("projector", SMALL)
def test_marks_are_in_the_text_around_rows(projector: str) -> None:
    """A family requires the special tokens around rows, but not the names of tiles, because some vocabularies
    lack these names."""
    # In two families, larger pictures have more special tokens.
    side = {"resampler": 500, "llama4": 100}.get(projector, 50)  # pixels
    layout = cut_of(side, side, vision_config(projector), TokenLimits()).layout
    text = "".join(part for part in layout if isinstance(part, str))
    marks = re.findall(r"<[^>]+>|\[\w+\]", re.sub(r"<global-img>|<row_\d_col_\d>", "", text))
    assert set(family(projector).marks) == set(marks)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("idefics3", {"arch": "gemma3"}, "architecture llama, smollm3, and the model's is 'gemma3'"),
        ("idefics3", {"n_embd": 48}, "rows have 64 values, the model's embeddings 48"),
        ("qwen3vl", {"arch": "qwen3vl", "n_deepstack_layers": 3}, "2 deepstack layers, the model 3"),
        ("glm4v", {"arch": "glm4"}, "has no RoPE sections (glm4.rope.dimension_sections)"),
        ("idefics3", {"tokens": ["a", "<image>"]}, "vocabulary lacks <fake_token_around_image>, which"),
        ("gemma3", {"arch": "gemma3", "tokens": ["<start_of_image>"]}, "vocabulary lacks <end_of_image>"),
        ("internvl", {"arch": "qwen2", "tokens": ["a"]}, "vocabulary lacks <img> and </img>"),
    ],
)
def test_projectors_of_another_model(models: Path, tmp_path: Path, name: str, text: Any, words: str) -> None:
    path = text_model(tmp_path / "text.gguf", **text)
    with GGUF.open(path) as file, pytest.raises(UnsupportedModel, match=re.escape(words)) as caught:
        open_projector(models, name, "numpy", text=file).close()
    assert f"{name}.gguf" in str(caught.value) and "text.gguf" in str(caught.value)


@pytest.mark.parametrize(("per_layer", "both_ways"), [(0, True), (8, False)])
def test_which_gemma_4_sees_pictures_both_ways(
    models: Path, tmp_path: Path, per_layer: int, both_ways: bool
) -> None:
    path = text_model(tmp_path / "text.gguf", "gemma4", embedding_length_per_layer_input=per_layer)
    with GGUF.open(path) as file, open_projector(models, "gemma4v", "numpy", text=file) as projector:
        [rows] = projector.encode(picture_of("gemma4v", projector))
        assert rows.both_ways is both_ways


def test_pictures_that_are_too_large(models: Path) -> None:
    with open_projector(models, "qwen2.5vl", "numpy", limits=TokenLimits(max_tokens=700)) as projector:
        for grid in ((60, 60), (2, 1300)):  # 3,600 patches; 163 windows
            patches = np.zeros((grid[0] * grid[1], 588), np.float32)
            with pytest.raises(InvalidArgument, match="--image-max-tokens"):
                projector.encode(Picture(bytes(16), (Tile(patches, grid),), (0,)))
    with pytest.raises(InvalidArgument, match="--image-max-tokens"):
        open_projector(models, "qwen2vl", "numpy", limits=TokenLimits(max_tokens=1 << 14))


@pytest.mark.parametrize("most", [900_000, *(wide(pytest.param(n)) for n in (1 << 20, 600_000))])
def test_values_that_a_device_cannot_bind(models: Path, most: int) -> None:
    """The error names the largest value that fits. A step's number of rows is rounded up, so a value in
    proportion to the free memory would not fit."""
    path = models / "qwen2vl.gguf"
    if not path.exists():
        write(build("qwen2vl"), path)

    def opened(**limits: int) -> Projector:
        [device] = open_devices(["numpy"])
        device.limits = replace(device.limits, max_storage_range=most)
        return Projector.open(path, device, limits=TokenLimits(**limits))

    with pytest.raises(InvalidArgument, match="--image-max-tokens") as caught:
        opened()
    fits = int(re.findall(r"--image-max-tokens (\d+)", str(caught.value))[0])
    opened(max_tokens=fits).close()
    with pytest.raises(InvalidArgument, match=f"--image-max-tokens {fits}, or"):
        opened(max_tokens=fits + 1)


def test_text_models_are_no_projectors(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no projector"):
        open_file(text_model(tmp_path / "text.gguf"))
