"""`vkbackend completion`: print a shell script that completes commands and flags.

On Tab, the script runs `vkbackend`, whose parser prints the completions. So install the script only once:

bash: vkbackend completion bash > ~/.local/share/bash-completion/completions/vkbackend; zsh: vkbackend
completion zsh > "${fpath[1]}/_vkbackend"; fish: vkbackend completion fish >
~/.config/fish/completions/vkbackend.fish
"""

from __future__ import annotations

import argparse
import sys

import argcomplete

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")


def run(args: argparse.Namespace) -> int:
    sys.stdout.write(argcomplete.shellcode(["vkbackend"], shell=args.shell))
    return 0
