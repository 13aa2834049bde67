#!/usr/bin/env bash
# Set up a fresh checkout and list the Vulkan devices.
# Then generate text with the demo model, with tensor parallelism on two devices.
# Arguments are flags of `vkbackend generate`: bash tools/demo.sh -p "..." -n 40 --seed 3
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tools/setup.sh
vkbackend=.venv/bin/vkbackend

# Use two devices if both are GPUs or both are software drivers, otherwise open the first device twice.
# A GPU would only wait for a software driver.
# Shares are equal, because shares by speed would assign this small model to the faster device alone.
pair=$("$vkbackend" devices --json | .venv/bin/python -c '
import json, sys
soft = ["cpu" in device["type"].lower() for device in json.load(sys.stdin)]
print("0,1" if len(soft) > 1 and soft[0] == soft[1] else "0,0")')

"$vkbackend" devices
echo
on=(-dev "$pair" -ts 1,1)
[[ " $* " =~ " -dev "|" --device "|" -ts "|" --tensor-split " ]] && on=()
command=("$vkbackend" generate -p "Once upon a time" -n 120 --temp 0.8 --seed 7 "${on[@]}" "$@")
shown=$(printf ' %q' "${command[@]}")
echo "\$${shown//\\,/,}"  # %q escapes commas needlessly
exec "${command[@]}"
