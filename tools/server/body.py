"""Read a request's body within limits. Each field is checked when it is used.

Null fields count as missing. Unknown fields are ignored, because clients of newer APIs send them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from vkbackend.checks import finite_number, refused, shown, whole_number
from vkbackend.errors import InvalidArgument
from vkbackend.tools.server.failures import ClientGone, Refusal
from vkbackend.tools.server.limits import Limits

Receive = Callable[[], Awaitable[Any]]
T = TypeVar("T")
U = TypeVar("U")

# A thread decodes larger bodies one at a time, because 8 MiB may become 200 MiB.
LARGE_NBYTES = 256 << 10
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NO_BRACKET = bytes(c for c in range(256) if c not in b"[]{}")


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], limits: Limits) -> bytes:
    """Raises Refusal (413, 408), ClientGone."""
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length[:20]) > limits.body_nbytes:
        raise _too_large(limits)
    pieces, n_bytes = [], 0
    try:
        async with asyncio.timeout(limits.body_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                pieces.append(message.get("body", b""))
                n_bytes += len(pieces[-1])
                if n_bytes > limits.body_nbytes:
                    raise _too_large(limits)
                if not message.get("more_body"):
                    return b"".join(pieces)
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {limits.body_s:g} s; send it faster") from None


def _too_large(limits: Limits) -> Refusal:
    return Refusal(413, f"the body is larger than {limits.body_nbytes >> 20} MiB; split the request")


async def read_fields(
    receive: Receive, headers: Mapping[bytes, bytes], limits: Limits, large: asyncio.Lock
) -> Fields:
    """Read and decode a body. Only one large body is decoded at a time. Raises Refusal, ClientGone."""
    body = await read_body(receive, headers, limits)
    if len(body) <= LARGE_NBYTES:
        return decode(body, limits)
    async with large:
        return await asyncio.to_thread(decode, body, limits)


async def read_entries(
    receive: Receive, headers: Mapping[bytes, bytes], limits: Limits, large: asyncio.Lock
) -> list[Fields]:
    """Read and decode a body that is a list of objects. Raises Refusal, ClientGone, InvalidArgument."""
    body = await read_body(receive, headers, limits)
    async with large:
        value = await asyncio.to_thread(_value_of, body, limits)
    if not isinstance(value, list):
        raise Refusal(400, f"the body is a JSON {_json_type(value)}; send a list of objects")
    return [Fields(_typed(f"[{i}]", entry, dict, "an object"), f"[{i}].") for i, entry in enumerate(value)]


def decode(body: bytes, limits: Limits) -> Fields:
    value = _value_of(body, limits)
    if not isinstance(value, dict):
        raise Refusal(400, f"the body is a JSON {_json_type(value)}; send an object")
    return Fields(value)


def _value_of(body: bytes, limits: Limits) -> Any:
    if not body.strip():
        raise Refusal(400, "the body is empty; send a JSON object")
    if depth_of(body) > limits.json_depth:
        raise Refusal(400, f"the body is nested deeper than {limits.json_depth} levels; flatten it")
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not valid JSON: {error}") from None


def depth_of(body: bytes) -> int:
    """Return the nesting depth of valid JSON, which is checked before a recursive parser reads the text."""
    if body.count(b"[") + body.count(b"{") <= 1:
        return 1
    brackets = _STRING.sub(b"", body).translate(None, _NO_BRACKET)
    if not brackets:
        return 0
    codes = np.frombuffer(brackets, np.uint8)
    steps = np.where((codes == ord("[")) | (codes == ord("{")), 1, -1)
    return int(np.cumsum(steps, dtype=np.int64).max())


def _json_type(value: object) -> str:
    names = {
        list: "array",
        str: "string",
        bool: "boolean",
        int: "number",
        float: "number",
        type(None): "null",
    }
    return names.get(type(value), "value")


class Fields:
    """The fields of a JSON object. `where` precedes a field's name in messages, for example "tools[0].".
    Methods raise InvalidArgument with the field's name."""

    def __init__(self, values: dict[str, Any], where: str = "") -> None:
        self.values, self._where = values, where

    def name(self, name: str) -> str:
        return self._where + name

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def _checked(self, name: str, default: T, check: Callable[[str, Any], U]) -> T | U:
        value = self.values.get(name)
        return default if value is None else check(self.name(name), value)

    def whole(self, name: str, low: int, high: int, default: T) -> int | T:
        return self._checked(name, default, lambda path, value: whole_number(path, value, low, high))

    def number(self, name: str, low: float, high: float, default: T) -> float | T:
        return self._checked(name, default, lambda path, value: finite_number(path, value, low, high))

    def switch(self, name: str, default: bool = False) -> bool:
        return self._checked(name, default, lambda path, value: _typed(path, value, bool, "true or false"))

    def text(self, name: str, default: T) -> str | T:
        return self._checked(name, default, lambda path, value: _typed(path, value, str, "a string"))

    def word(self, name: str, known: Sequence[str], default: T) -> str | T:
        def check(path: str, value: Any) -> Any:
            if value not in known or not isinstance(value, str):
                raise refused(path, value, f"expected one of {', '.join(known)}")
            return value

        return self._checked(name, default, check)

    def items(self, name: str, most: int) -> list[Any]:
        entries: list[Any] = self._checked(name, [], lambda path, value: _typed(path, value, list, "a list"))
        if len(entries) > most:
            raise InvalidArgument(
                f"{self.name(name)} has {len(entries)} entries, at most {most} are allowed",
                argument=self.name(name),
            )
        return entries

    def inner(self, name: str) -> Fields | None:
        value = self.values.get(name)
        if value is None:
            return None
        return Fields(_typed(self.name(name), value, dict, "an object"), f"{self.name(name)}.")

    def objects(self, name: str, most: int) -> list[Fields]:
        path = self.name(name)
        return [
            Fields(_typed(f"{path}[{i}]", value, dict, "an object"), f"{path}[{i}].")
            for i, value in enumerate(self.items(name, most))
        ]

    def required(self, name: str) -> None:
        if self.values.get(name) is None:
            raise InvalidArgument(f"{self.name(name)} is missing", argument=self.name(name))

    def refuse(self, name: str, *harmless: Any, why: str) -> None:
        """Raise InvalidArgument for an unsupported field, unless its value is in `harmless`."""
        value = self.values.get(name)
        if value is not None and not any(value == same and type(value) is type(same) for same in harmless):
            raise InvalidArgument(f"{self.name(name)}={shown(value)}: {why}", argument=self.name(name))


def _typed(name: str, value: Any, kind: type, expected: str) -> Any:
    if not isinstance(value, kind):
        raise refused(name, value, f"expected {expected}")
    return value
