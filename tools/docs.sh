#!/usr/bin/env bash
# Builds the documentation site into build/site; warnings are errors. Needs the extra `docs`: .venv/bin/pip
# install -e '.[docs]' && bash tools/docs.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
"$python" -m vkbackend.tools.checkout.linked_tree build/tree
exec "$python" -m zensical build --clean --strict
