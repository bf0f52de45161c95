#!/usr/bin/env bash
# Make .venv with everything locked in requirements.lock, once; takes a second when nothing changed.
#   usage: deploy/setup.sh            PYTHON=python3.11 chooses the interpreter
# Shared by deploy/launch.sh and tests/run.sh. After editing dependencies: deploy/setup.sh --lock
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

uv_version=0.13.8
python=${PYTHON:-python3}
say() { printf '\033[1m[setup]\033[0m %s\n' "$*" >&2; }

require_python() {
  "$python" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info < (3, 13)))' || {
    say "$("$python" --version) will not do: Python 3.11 or 3.12 is needed; set PYTHON=/path/to/python3.11"
    exit 1
  }
}

make_venv() {
  [[ "$(.venv/bin/python -m uv --version 2>/dev/null)" != *"uv $uv_version"* ]] || return 0
  # Without python3-venv, or with Ctrl-C, `python -m venv` leaves a .venv/bin/python without pip.
  .venv/bin/python -m pip --version >/dev/null 2>&1 || {
    require_python
    say "making .venv"
    "$python" -m venv --clear .venv
  }
  say "installing uv $uv_version"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check "uv==$uv_version"
}

lock() {
  say "resolving pyproject.toml into requirements.lock"
  .venv/bin/python -m uv pip compile --quiet --universal --no-annotate --no-header --extra dev \
    --python-version 3.11 pyproject.toml -o requirements.lock
}

# The folder, too: in a copy of it .venv/bin/tpla would still run the code of the original.
stamp() { { pwd && cat pyproject.toml requirements.lock deploy/setup.sh; } | sha256sum; }

install() {
  say "installing $(grep -c '==' requirements.lock) packages (about 9 GB, some minutes the first time)"
  # Bytecode now: a deployment starts a dozen processes, and each would compile SGLang for itself
  # (40 s of CPU) wherever PYTHONDONTWRITEBYTECODE is set.
  UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180} .venv/bin/python -m uv pip install \
    --compile-bytecode --python .venv/bin/python -r requirements.lock
  .venv/bin/python -m uv pip install --python .venv/bin/python --no-deps --no-build-isolation -e . 2>&1 |
    grep -v '^$' >&2
}

link_for_mypy() { # mypy cannot follow the editable install's import hook
  mkdir -p .mypy_path/tpla
  for folder in core convert kernels workers router server benchmarks; do
    ln -sfn "../../$folder" ".mypy_path/tpla/$folder"
  done
}

make_venv
[ "${1:-}" != --lock ] || lock
if [ "$(stamp)" != "$(cat .venv/.tpla-stamp 2>/dev/null)" ]; then
  install
  stamp > .venv/.tpla-stamp
  say "ready"
fi
link_for_mypy
