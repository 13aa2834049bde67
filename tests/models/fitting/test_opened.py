"""A model that is opened with `fit` needs less memory if less memory is free."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from device_sets import device_params, wide

from vkbackend import LLM
from vkbackend.device_info import DeviceInfo
from vkbackend.errors import OutOfDeviceMemory
from vkbackend.models.engine.runner import loading
from vkbackend.models.fitting import fitter
from vkbackend.models.placement import fit
from vkbackend.tools import cli

MODEL = "stories-narrow-F32.gguf"


def fit_of(llm: LLM) -> str:
    [line] = [line for line in llm.notes if line.startswith("fit: ")]
    return line.removeprefix("fit: ")


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list with one number, the budget of all devices together in bytes."""
    nbytes = [1 << 40]

    def budgets(devices: Any) -> list[fit.Budget]:
        return [fit.Budget("gpu", nbytes[0], tuple(range(len(devices))))]

    for module in (fit, loading, fitter):
        monkeypatch.setattr(module, "budgets_of", budgets)
    return nbytes


@pytest.mark.parametrize("info", [*device_params()[:1], *map(wide, device_params()[1:])])
def test_it_starts_on_a_device(models: Path, info: DeviceInfo) -> None:
    with LLM(models / MODEL, devices=[info.uuid], fit=True) as llm:
        assert fit_of(llm) == f"-c {llm.n_ctx} -ctk f16 -ctv f16 -ngl all"
        assert llm.generate("Once upon a time", max_tokens=4, temperature=0).text


@pytest.mark.no_vulkan
def test_less_memory_gives_less_or_one_error(models: Path, room: list[int]) -> None:
    given: dict[str, Any] = {"devices": ["numpy"], "fit": True, "fit_target": 0, "fit_ctx": 256}
    with LLM(models / MODEL, **given) as llm:
        whole, held = llm.n_ctx, llm.memory()[0]
    room[0] = int((held["weights"] + held["scratch"] + held["kv"] // 2) / 0.98)
    with LLM(models / MODEL, **given) as llm:
        assert 256 <= llm.n_ctx < whole
        words = fit_of(llm).split()
        held = llm.memory()[0]
        assert held["weights"] + held["scratch"] + held["kv"] <= room[0]
    args, _ = cli.parse(["generate", *words])
    pasted = {name: getattr(args, name) for name in ("n_ctx", "type_k", "type_v", "n_gpu_layers")}
    with LLM(models / MODEL, devices=["numpy"], **pasted) as llm:
        assert llm.n_ctx == args.n_ctx
    room[0] = held["weights"] // 8  # since then, another program has taken the memory
    with pytest.raises(OutOfDeviceMemory, match="gpu would hold"):
        LLM(models / MODEL, devices=["numpy"], **pasted)
    with pytest.raises(OutOfDeviceMemory, match="gpu would hold"):
        LLM(models / MODEL, **given)


@pytest.mark.no_vulkan
def test_plan_and_generate_agree(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["-m", str(models / MODEL), "-dev", "numpy,numpy", "-ts", "1,1", "--fit-ctx", "300"]
    assert cli.main(["plan", *line]) == 0
    planned = re.findall("^fit: .*", capsys.readouterr().out, re.M)
    assert cli.main(["generate", *line, "-n", "1", "--temp", "0"]) == 0
    assert re.findall("^fit: .*", capsys.readouterr().err, re.M) == planned != []
    assert "-ts" not in planned[0]
    assert cli.parse(["generate", *line, "--fit", "off"])[0].fit == ()
