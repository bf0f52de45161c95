#!/usr/bin/env bash
# Serve the embedded model (or --model DIR) on this host: sets everything up, then runs `tpla launch`.
#   usage: deploy/launch.sh --prefill 2 --decode 4 [--model DIR] [--port 8000] [--decode-tp 2]
#          [--groups 2] [--kv-format fp8|bf16|fp32] [--transfer auto|zmq|nccl] ...   (deploy/launch.sh --help)
# Small machines: --prefill 1 --decode 2. Ctrl-C stops every process.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/deploy/setup.sh"
exec "$root/.venv/bin/tpla" launch --state "$root/.tpla" "$@"
