#!/usr/bin/env bash
# What one NVIDIA GPU shows in 8 minutes, as tables in $OUT (default _build/gpu); nothing is installed.
# PYTHON (default python3) needs torch 2.10 or later; cells and compare need cloudpickle and numpy too.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH=$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH} exec timeout 480 "${PYTHON:-python3}" tools/on_gpu.py "$@"
