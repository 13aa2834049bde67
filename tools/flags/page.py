"""Write docs/llama-cpp.md from the table: `python -m vkbackend.tools.flags.page > docs/llama-cpp.md`."""

from __future__ import annotations

import sys
from collections import Counter

from vkbackend.tools.flags.table import CLASSES, COMMANDS, Flag, table

HEAD = """\
# llama.cpp's command lines

A llama.cpp command line either runs here, or stops with a message that says what to use instead. Every flag
of `llama-cli`, `llama-completion`, `llama-server`, `llama-bench` and `llama-perplexity` is in one of four
classes.

| llama.cpp | here |
|---|---|
| `llama-cli` | `vkbackend chat` |
| `llama-completion` | `vkbackend generate`, which is `-no-cnv`; with `-cnv`, `vkbackend chat` |
| `llama-server` | `vkbackend serve` |
| `llama-bench` | `vkbackend bench` |
| `llama-perplexity` | `vkbackend perplexity` |

- **Works**: the flag has the same effect as in llama.cpp. **Works under another name**: a line on stderr
  gives the name.
- **Taken without effect**: the flag does not change the text; a line on stderr gives the reason.
- **Refused**: the command ends, and its message gives the reason and an alternative. A value that changes
  nothing (`--grp-attn-n 1`) is accepted.

One error message names all unknown and refused flags of a command line. As in llama.cpp, `--ctx_size` means
`--ctx-size`.

Environment variables work as in llama.cpp: `LLAMA_ARG_CTX_SIZE=4096` is `--ctx-size 4096`, and `1`, `true`,
`on` and `enabled` turn a switch on. A flag on the command line overrides its variable. A line on stderr names
each variable in use. `bench` reads no variables, and no command reads llama.cpp's `config.ini`.

Lists of `bench` are measured in all combinations, as in llama-bench: `-ctk f16,q8_0 -sm row,layer` is four
tests. Two flags differ: `-dev 0,1` and `-ts 3,1` name the devices of one test and their shares; with `/`
between devices (`-dev 0/1,0`, `-ts 1/1,3/1`), the comma separates tests.

The list is of llama.cpp at commit 0c1e57098 (in llama-cpp-python 0.3.36). This page is written by `python
-m vkbackend.tools.flags.page` from `tools/flags/llama_cpp.tsv`; `python -m
vkbackend.tools.studies.llama_cpp_flags FOLDER` compares that list with a newer source.

## Flags by class
"""


def counts() -> str:
    """Return a Markdown table with the number of flags of each class, for each program of llama.cpp."""
    lines = ["| program | " + " | ".join(CLASSES.values()) + " | all |", "|---" * (len(CLASSES) + 2) + "|"]
    for program, (command, *_) in COMMANDS.items():
        count = Counter(
            flag.kind
            for flag in table()
            if program in flag.programs and command in flag.commands and not flag.earlier
        )
        cells = [count[kind] for kind in CLASSES]
        lines.append(f"| llama-{program} | " + " | ".join(map(str, [*cells, sum(cells)])) + " |")
    return "\n".join(lines)


def row(flag: Flag) -> str:
    names = ", ".join(f"`{name}`" for name in flag.names)
    value = f" `{flag.value}`" if flag.value else ""
    variable = f"; `{flag.env}`" if flag.env else ""
    neutral = f" (taken: {', '.join(flag.neutral)})" if flag.neutral else ""
    text = flag.text.replace("<", "&lt;") + neutral
    cells = f"{names}{value}{variable}", ", ".join(flag.commands), text
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page() -> str:
    parts = [HEAD, counts(), ""]
    for kind, title in CLASSES.items():
        flags = [flag for flag in table() if flag.kind == kind]
        heading = {
            "works": "",
            "mapped": "what it is here",
            "none": "why",
            "refused": "why, and what to use",
        }[kind]
        parts += [f"## {title.capitalize()}", "", f"| flag | commands | {heading} |", "|---|---|---|"]
        parts += [*map(row, flags), ""]
    return "\n".join(parts).rstrip("\n") + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
