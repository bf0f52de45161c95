#!/usr/bin/env bash
# Everything a change must pass: lint, types, unit, contract, integration and end-to-end tests.
#   usage: tests/run.sh [pytest arguments]       with arguments, only pytest runs, with them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
deploy/setup.sh
step() { printf '\033[1m[test]\033[0m %s\n' "$*" >&2; }
if [ $# -gt 0 ]; then exec .venv/bin/python -m pytest "$@"; fi

step "ruff"
.venv/bin/ruff check .
.venv/bin/ruff format --check --quiet .
step "mypy"
.venv/bin/mypy -p tpla
step "pytest: unit, kernels, contract, integration"
# One thread: the tests start processes of their own, and more threads only contend.
OMP_NUM_THREADS=1 .venv/bin/python -m pytest -m "not e2e and not matrix and not soak" --durations=10
step "pytest: end to end, on real workers"
OMP_NUM_THREADS=1 .venv/bin/python -m pytest -m "e2e and not matrix and not soak" --durations=15
