"""Options classes: frozen dataclasses with a check per field. Functions accept the fields as keywords.

A TypedDict with the same names shows editors and mypy each option's type and description (`**options:
Unpack[...]`).
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, field, fields
from functools import cache, wraps
from typing import Any, TypeVar, get_type_hints

from vkbackend.errors import UnknownArgument

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def option(default: T, check: Callable[[str, Any], T]) -> T:
    """Declare a dataclass field. `check` is a function from checks.py."""
    declared: Any = field(default=default, metadata={"check": check})
    return declared  # Type checkers see the default's type.


def check_fields(options: Any) -> None:
    """Replace every field by its checked value. Call this in `__post_init__`."""
    kind: type = type(options)
    for name, check, kept in _checks(kind):
        if (value := getattr(options, name)) is not kept:
            object.__setattr__(options, name, check(name, value))


@cache
def _checks(options: type) -> list[tuple[str, Callable[[str, Any], Any], Any]]:
    """Return (name, check, default) of each field with a check. Values equal to `default` are not checked,
    which saves 250 us per request. If the check changes a field's default, `default` is MISSING."""
    checks = []
    for declared in fields(options):
        if check := declared.metadata.get("check"):
            is_kept = (
                declared.default is not MISSING and check(declared.name, declared.default) == declared.default
            )
            checks.append((declared.name, check, declared.default if is_kept else MISSING))
    return checks


def takes(keywords: type, options: type) -> Callable[[F], F]:
    """Decorate a function that has the parameter `**options: Unpack[keywords]`. `help` and completion then
    list the options. An unknown name raises UnknownArgument."""
    hints = get_type_hints(keywords)
    defaults = {declared.name: declared.default for declared in fields(options)}

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        listed = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint)
            for name, hint in hints.items()
        ]
        known = [p.name for p in (*named, *listed)]
        function_name = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            for name in given:
                if name not in known:
                    raise unknown(function_name, name, known[1:])
            return function(*args, **given)

        checked.__signature__ = signature.replace(parameters=[*named, *listed])  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return decorate


def unknown(function: str, name: str, known: Iterable[str]) -> UnknownArgument:
    """Return an error that suggests the closest known keyword, or lists all keywords."""
    near = difflib.get_close_matches(name, known, 1, 0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
    return UnknownArgument(f"{function}() takes no keyword {name!r}; {hint}")
