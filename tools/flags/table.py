"""llama.cpp's flags and what becomes of each here, read from llama_cpp.tsv: the parser, docs/llama-cpp.md and
the tests read this one table."""

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
COMMANDS = {  # llama.cpp's program -> commands of vkbackend
    "cli": ("chat", "generate"),
    "completion": ("generate", "chat"),
    "server": ("serve",),
    "perplexity": ("perplexity",),
    "bench": ("bench",),
}
ON, OFF = ("on", "enabled", "true", "1"), ("off", "disabled", "false", "0")


@dataclass(frozen=True, slots=True)
class Flag:
    """`env`: the variable that sets it. `neutral`: values that ask for what happens anyway. `text`: for kind
    "none" why it has no effect, for "mapped" to what, for "refused" why and what to use. `earlier`: it is
    not in the version that the list was read from."""

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
        """The words that llama.cpp takes; empty: any."""
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
