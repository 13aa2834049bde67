import math
from typing import Any

import pytest

from vkbackend.errors import InvalidArgument
from vkbackend.models.sampling.params import ORDER, SamplingParams
from vkbackend.tools import cli
from vkbackend.tools.flags.sampling import sampling_of

pytestmark = pytest.mark.no_vulkan


def parsed(*words: str) -> SamplingParams:
    return sampling_of(cli.parse(["generate", "-s", "1", *words])[0])


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("--temp 0.5 --top-k 3 --top-p 0.8 --min-p 0.2",
         {"temperature": 0.5, "top_k": 3, "top_p": 0.8, "min_p": 0.2}),
        ("--temperature 0.5", {"temperature": 0.5}),
        ("--dynatemp-range 0.3 --dynatemp-exp 2", {"dynatemp_range": 0.3, "dynatemp_exponent": 2.0}),
        ("--typical 0.9", {"typical_p": 0.9}), ("--typical-p 0.9", {"typical_p": 0.9}),
        ("--top-nsigma 1.5", {"top_n_sigma": 1.5}), ("--top-n-sigma -1", {"top_n_sigma": -1.0}),
        ("--xtc-probability 0.5 --xtc-threshold 0.2", {"xtc_probability": 0.5, "xtc_threshold": 0.2}),
        ("--repeat-penalty 1.1 --repeat-last-n -1", {"repeat_penalty": 1.1, "repeat_last_n": -1}),
        ("--presence-penalty 0.2 --frequency-penalty -0.2",
         {"presence_penalty": 0.2, "frequency_penalty": -0.2}),
        ("--dry-multiplier 0.8 --dry-base 2 --dry-allowed-length 3 --dry-penalty-last-n 99",
         {"dry_multiplier": 0.8, "dry_base": 2.0, "dry_allowed_length": 3, "dry_penalty_last_n": 99}),
        ("--dry-sequence-breaker , --dry-sequence-breaker ab", {"dry_sequence_breakers": (",", "ab")}),
        ("--dry-sequence-breaker none", {"dry_sequence_breakers": ()}),
        ("--mirostat 2 --mirostat-lr 0.2 --mirostat-ent 3",
         {"mirostat": 2, "mirostat_eta": 0.2, "mirostat_tau": 3.0}),
        ("-l 5+1.5 --logit-bias 7-inf -l 9-2", {"logit_bias": ((5, 1.5), (7, -math.inf), (9, -2.0))}),
        ("--samplers top-k;temp;penalties", {"samplers": ("top_k", "temperature", "penalties")}),
        ("--sampler-seq edskypmxt", {"samplers": ORDER}),
        ("--sampling-seq kt", {"samplers": ("top_k", "temperature")}),
        ("--min-tokens 4 --stop-token-ids 5,6", {"min_tokens": 4, "stop_token_ids": (5, 6)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_values(words: str, fields: dict[str, Any]) -> None:
    assert parsed(*words.split()) == SamplingParams(seed=1, **fields)


@pytest.mark.parametrize(
    ("words", "said"),
    [("-l 5", "15043"), ("-l 5+x", "15043"), ("-l 5+inf", "15043"),
     ("--sampler-seq kz", "'z' is not a sampler"),
     ("--samplers top_k;best", "not a sampler; there are: penalties, dry"), ("--mirostat 3", "mirostat=3"),
     ("--stop-token-ids 5,x", "stop_token_ids"), ("--xtc-probability 2", "xtc_probability=2")],
)  # fmt: skip
def test_wrong_values_are_named(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((InvalidArgument, SystemExit)) as error:
        parsed(*words.split())
    assert said in str(error.value) + capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_has_every_flag_with_its_default(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse([command, "--help"])
    text = capsys.readouterr().out
    for flag in ("--presence-penalty", "--dry-multiplier", "--typical", "--logit-bias", "--samplers"):
        assert flag in text
