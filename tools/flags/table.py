"""The table llama_cpp.tsv, with vkbackend's treatment of each flag of llama.cpp."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

CLASSES = {
    "works": "works",
    "none": "taken without effect",
    "mapped": "works under another name",
    "refused": "refused",
}
COMMANDS = {  # program of llama.cpp -> vkbackend's commands
    "cli": ("chat", "generate"),
    "completion": ("generate", "chat"),
    "server": ("serve",),
    "perplexity": ("perplexity",),
    "bench": ("bench",),
}
ON, OFF = ("on", "enabled", "true", "1"), ("off", "disabled", "false", "0")


@dataclass(frozen=True, slots=True)
class Flag:
    """`env` is the environment variable that sets the flag. `neutral` values change nothing, so even a
    refused flag accepts them. `text` depends on the kind: why a "none" flag has no effect, what replaces a
    "mapped" flag, or why a "refused" flag is refused and what to use instead. `earlier` marks a flag that the
    table's version of llama.cpp no longer has.
    """

    names: tuple[str, ...]
    value: str
    env: str
    programs: tuple[str, ...]
    commands: tuple[str, ...]
    neutral: tuple[str, ...]
    kind: str
    text: str
    earlier: bool = False

    @property
    def switch(self) -> bool:
        return not self.value

    @property
    def long_name(self) -> str:
        return next((name for name in self.names if name.startswith("--")), self.names[0])

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that llama.cpp accepts. An empty tuple means any value."""
        inner = self.value[1:-1]
        if self.value in ("[on|off|auto]", "<on|off|auto>", "[on|off]"):
            return (*ON, *OFF, *(("auto", "-1") if "auto" in inner else ()))
        if self.value[:1] + self.value[-1:] in ("<>", "{}") and ("|" in inner or "," in inner):
            words = tuple(inner.replace("|", ",").split(","))
            return words if all(word.replace("+", "").replace("-", "").isalnum() for word in words) else ()
        return {"--numa": ("distribute", "isolate", "numactl"), "--lazy-mode": ("on", "auto", "off")}.get(
            self.long_name, ()
        )


@cache
def table() -> tuple[Flag, ...]:
    flags, earlier = [], False
    for line in (files("vkbackend.tools.flags") / "llama_cpp.tsv").read_text("utf-8").splitlines():
        if line.startswith("#"):
            earlier |= line == "# earlier versions"
            continue
        names, value, env, programs, commands, neutral, kind, text = line.split("\t")
        of = tuple(programs.split())
        given = tuple(commands.split()) or tuple(dict.fromkeys(c for p in of for c in COMMANDS[p]))
        flags.append(
            Flag(tuple(names.split()), value, env, of, given, tuple(neutral.split()), kind, text, earlier)
        )
    return tuple(flags)


def flags_of(command: str) -> list[Flag]:
    return [flag for flag in table() if command in flag.commands]
