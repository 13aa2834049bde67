#!/usr/bin/env bash
# Check random hostile input of every kind (tests/support/fuzz), and keep the smallest case of each finding.
# Arguments: bash tools/fuzz.sh [--cases N] [--seed S] [--seconds T] [--all] [--replay FILE ...] [KIND ...]
# Without arguments, each kind runs for 20 seconds. `bash tools/fuzz.sh --help` lists the kinds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ -x .venv/bin/pytest ] || bash tools/setup.sh --test
export PYTHONPATH="tests/support${PYTHONPATH:+:$PYTHONPATH}" OPENBLAS_NUM_THREADS=1 VKBACKEND_EXACT=1 VKBACKEND_AHEAD=0
exec .venv/bin/python -m fuzz "$@"
