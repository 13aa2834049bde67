"""Compare tools/flags/llama_cpp.tsv with the flags in a source tree of llama.cpp, to update the list.

    python -m vkbackend.tools.studies.llama_cpp_flags LLAMA_CPP_FOLDER

Prints rows for new flags (class `?`), and the names of flags that were removed or whose value, variable or
program changed. The script reads only names from llama.cpp; the reasons in the table were written for this
project.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = {"COMPLETION": "completion", "CLI": "cli", "SERVER": "server", "PERPLEXITY": "perplexity"}


@dataclass(frozen=True, slots=True)
class Fact:
    names: tuple[str, ...]
    value: str
    env: str
    programs: frozenset[str]


def common_flags(source: str) -> Iterator[Fact]:
    """Yield the flags of common/arg.cpp. A pair of --x and --no-x yields two flags."""
    source = re.sub(r"^\s*//.*$", "", source, flags=re.MULTILINE)
    lists = dict(re.findall(r"initializer_list<enum llama_example> (\w+) = \{([^}]*)\}", source))
    for block in re.split(r"add_opt\(common_arg\(", source)[1:]:
        head = re.match(
            r"\s*\{([^}]*)\}\s*,(?:\s*\{([^}]*)\}\s*,)?\s*((?:\"(?:[^\"\\]|\\.)*\"|\w+\(\))\s*,\s*)?", block
        )
        assert head is not None, block[:80]
        tail = re.split(r"(?<=;)\n(?: {4})?(?![ \n])", block[head.end() :])[0]
        negative = re.findall(r'"(-[^"]+)"', head[2] or "")
        has_value = head[3] is not None and not re.match(r"\[", tail) and not negative
        value = head[3].strip().rstrip(",").strip().strip('"') if has_value and head[3] else ""
        value = "LIST" if value.endswith("()") else value
        second = re.match(r'"([A-Z]+)"\s*,', tail) if value else None
        value += f" {second[1]}" if second else ""
        wanted = re.search(r"\.set_examples\(\{?([^})]*)\}?\)", tail)
        words = str(lists.get(wanted[1].strip(), wanted[1])) if wanted else "COMMON"
        programs = set(PROGRAMS) if "COMMON" in words else {p for p in PROGRAMS if f"_{p}" in words}
        if left_out := re.search(r"\.set_excludes\(\{([^}]*)\}\)", tail):
            programs -= {p for p in PROGRAMS if f"_{p}" in left_out[1]}
        if not programs or ".set_preset_only()" in tail:
            continue
        env = match[1] if (match := re.search(r'\.set_env\("(\w+)"\)', tail)) else ""
        of = frozenset(PROGRAMS[p] for p in programs)
        yield Fact(tuple(re.findall(r'"(-[^"]+)"', head[1])), value, env, of)
        if negative:
            yield Fact(tuple(negative), "", env.replace("LLAMA_ARG_", "LLAMA_ARG_NO_"), of)


def bench_flags(source: str) -> Iterator[Fact]:
    for line in re.findall(r'printf\("  (-[^"]*)"', source):
        usage = re.split(r"\s{2,}|\(default|\\n", line)[0]
        names = tuple(re.findall(r"(?<![\w<-])-{1,2}[A-Za-z][\w-]*", usage.partition("<")[0]))
        value = usage[usage.index("<") :].strip() if "<" in usage else ""
        yield Fact(names, value, "", frozenset({"bench"}))


def flags_in(folder: Path) -> list[Fact]:
    common = list(common_flags((folder / "common" / "arg.cpp").read_text(encoding="utf-8")))
    return common + list(
        bench_flags((folder / "tools" / "llama-bench" / "llama-bench.cpp").read_text(encoding="utf-8"))
    )


def compare(folder: Path) -> list[str]:
    from vkbackend.tools.flags.table import table

    known = {
        (name, program): (flag.value, flag.env)
        for flag in table() if not flag.earlier for name in flag.names for program in flag.programs
    }  # fmt: skip
    lines, present = [], set()
    for fact in flags_in(folder):
        keys = {(name, program) for name in fact.names for program in fact.programs}
        present |= keys
        if keys - set(known):
            programs = " ".join(sorted(fact.programs))
            lines.append("\t".join((" ".join(fact.names), fact.value, fact.env, programs, "", "", "?", "")))
        elif {known[key] for key in keys} != {(fact.value, fact.env)}:
            lines.append(f"changed: {' '.join(fact.names)}: {fact.value!r} {fact.env}")
    return lines + [f"gone: {name} of llama-{program}" for name, program in sorted(set(known) - present)]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print("\n".join(compare(Path(sys.argv[1]))) or "the table has every flag")
