#!/usr/bin/env bash
# Build the documentation site into build/site. Warnings are errors.
# The build needs the extra `docs`: .venv/bin/pip install -e '.[docs]' && bash tools/docs.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
"$python" -m vkbackend.tools.checkout.linked_tree build/tree
exec "$python" -m zensical build --clean --strict
