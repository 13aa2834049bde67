from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest
from device_sets import only, wide
from hypothesis import given
from hypothesis import strategies as st
from systems import WINDOWS

from vkbackend.errors import InvalidArgument, UnsupportedFeature, VkbackendError
from vkbackend.models.generate_options import GenerateOptions
from vkbackend.models.grammar import probe, structure
from vkbackend.models.grammar.compiler import Compiler, Vocabulary
from vkbackend.models.grammar.structure import MAX_DEPTH, MAX_NBYTES, Structure, schema_text, structure_of

pytestmark = pytest.mark.no_vulkan

VOCABULARY = Vocabulary((*(bytes([b]) for b in range(256)), b"", b'{"', b"<|end|>"), (256, 258), (258,))


def nested(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(n - 1):
        schema = {"items": schema}
    return schema


def test_a_schema_may_be_text_a_dict_a_bool_or_a_class() -> None:
    class Model:
        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            return {"type": "null"}

    given = '{ "type" : "null" }', {"type": "null"}, Model
    assert {schema_text("json_schema", schema) for schema in given} == {'{"type":"null"}'}
    assert schema_text("json_schema", True) == "true"
    assert schema_text("json_schema", None) is None


@pytest.mark.parametrize(
    "wrong",
    ["{", "[]", "null", 3, ["a"], {"enum": [float("nan")]}, {"enum": [object()]}, nested(MAX_DEPTH + 1),
     {"enum": ["x" * MAX_NBYTES]}, "[" * 100_000],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_invalid_schemas_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="json_schema"):
        structure_of(schema_text("json_schema", wrong), False, None, None, None)
    assert schema_text("json_schema", nested(MAX_DEPTH - 1))


def test_invalid_grammars_are_refused() -> None:
    for wrong in (
        {"regex": "\0"},
        {"regex": "\ud800"},
        {"lark": '%llguidance {"no_forcing": false}\nstart: "a"'},
    ):
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            GenerateOptions(seed=0, **wrong)  # type: ignore[arg-type]


def test_several_structures_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="json_object, regex"):
        _ = GenerateOptions(json_object=True, regex="a", seed=0).structure
    assert GenerateOptions(seed=0).structure is None


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedFeature, match=r"vkbackend\[grammar\]"):
        _ = GenerateOptions(regex="a", seed=0).structure


def test_the_library_is_imported_when_it_is_used() -> None:
    code = "import sys, vkbackend.models.llm; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- the compiler's errors ----


COMPILER = Compiler(VOCABULARY)


def compiled(kind: Any, text: str) -> Any:
    return COMPILER.start(COMPILER.compile(Structure(kind, text)).result(60))


@pytest.mark.parametrize(
    "schema",
    [{"type": "integer", "multipleOf": 1_000_003},
     wide(pytest.param({"type": "number", "multipleOf": 9999.9999})),
     wide(pytest.param({"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 997}]}))],
    ids=str,
)  # fmt: skip
def test_a_slow_grammar_is_refused_and_the_next_is_compiled(
    monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any]
) -> None:
    monkeypatch.setattr(probe, "COMPILE_S", 0.5)
    with pytest.raises(InvalidArgument, match=r"to compile, .*; make it simpler"):
        compiled("json_schema", json.dumps(schema))
    monkeypatch.undo()
    assert compiled("regex", "zz")


@pytest.mark.parametrize("seconds", only([0, 0.02, 0.5], "0", "0.5"))
def test_a_program_ends_while_a_grammar_is_compiled(seconds: float) -> None:
    code = (
        "import time\n"
        "from vkbackend.models.grammar.compiler import Compiler, Vocabulary\n"
        "from vkbackend.models.grammar.structure import Structure\n"
        "words = Vocabulary(tuple(bytes([b]) for b in range(256)), (), (0,))\n"
        'Compiler(words).compile(Structure(\'json_schema\', \'{"type":"integer","multipleOf":1000003}\'))\n'
        f"time.sleep({seconds})\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0


def test_a_forked_child_does_not_end_its_parents_process() -> None:
    tried = probe.Probe()
    assert tried.passes('start: "a"')
    process = tried._child._process  # type: ignore[union-attr]
    if (child := os.fork()) == 0:
        try:
            tried.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert process.poll() is None
    tried.close()


@pytest.mark.parametrize("seconds", [0, 0.02, 0.5])
def test_closing_refuses_pending_grammars(seconds: float) -> None:
    compiler = Compiler(VOCABULARY)
    future = compiler.compile(Structure("json_schema", '{"type":"integer","multipleOf":1000003}'))
    time.sleep(seconds)
    compiler.close()
    with pytest.raises(VkbackendError, match="is being closed"):
        future.result(60)
    compiler.wait_for_end(60)
    assert not compiler._thread.is_alive()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [("json_schema", '{"type":"strin"}', "strin"), ("json_schema", '{"not":{}}', "not"),
     ("json_schema", '{"uniqueItems":true}', "uniqueItems"),
     ("json_schema", '{"$ref":"http://localhost/x"}', "registry"),
     ("json_schema", '{"$ref":"file:///etc/passwd"}', "registry"),
     ("regex", "([", "unclosed"), ("regex", "a" * 40_000 + "{1000000}", ""), ("lark", "start: foo", "foo"),
     ("lark", "", "start"), ("grammar", "root ::= (", "GBNF"), ("grammar", "x ::= y", ""),
     ("grammar", "root ::= " + "(" * 50_000, "GBNF"),
     ("lark", "start: a0\n" + "\n".join(f"a{i}: a{i + 1} | a{i + 1} a{i + 1}" for i in range(1000))
      + '\na1000: "x"', "nested too deeply" if WINDOWS else "items"),  # Windows has a stack of 3 MB
     ("json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(3000)}}), "")],
    ids=lambda value: value[:24],
)  # fmt: skip
def test_an_unsupported_keyword_is_named_in_the_error(kind: Any, text: str, named: str) -> None:
    try:
        matcher = compiled(kind, text)
        matcher.find()
        matcher.take(int(matcher.allowed(259)[0]))
        raise AssertionError("it was taken") if named else InvalidArgument(kind)
    except Exception as error:
        assert type(error).__name__ in ("InvalidArgument", "VkbackendError") and named in str(error)
        assert len(str(error)) < 1500


def test_masks_allow_valid_continuations_and_no_control_tokens() -> None:
    matcher = compiled("json_schema", '{"enum":["<|end|>"]}')
    written = b""
    while not matcher.is_over:
        matcher.find()
        ids = matcher.allowed(259)
        assert 258 not in ids, "the control token of the same text"
        written += VOCABULARY.pieces[int(ids[-1])]
        matcher.take(int(ids[-1]))
    assert json.loads(written) == "<|end|>"


def test_white_space_ends() -> None:
    matcher = compiled("json_schema", '{"type":"object"}')
    written = 0
    for token in b"{":
        matcher.find()
        matcher.take(token)
    while True:
        matcher.find()
        white = [i for i in matcher.allowed(259) if i < 256 and chr(i).isspace()]
        if not white:
            break
        matcher.take(int(white[-1] if written else 10))
        written += 1
        assert written < 100
    assert written > 1


@given(st.text("ab()|*+[]{}\\.^$?1,", max_size=12))
def test_any_regex_is_accepted_or_refused(regex: str) -> None:
    if not regex:
        return
    try:
        matcher = compiled("regex", regex)
    except InvalidArgument:
        return
    matcher.find()


def test_the_cache_is_bounded() -> None:
    compiler = Compiler(VOCABULARY)
    first = compiler.compile(Structure("regex", "a"))
    assert compiler.compile(Structure("regex", "a")) is first
    for i in range(100):
        compiler.compile(Structure("regex", f"a{{{i + 1}}}"))
    assert len(compiler._kept) == 64
    for i in range(40):
        compiler.compile(Structure("regex", f"(x{i})?" + "y" * 120_000))
    assert sum(len(entry.text) for entry in compiler._kept) <= 1 << 22
    compiler.close()
