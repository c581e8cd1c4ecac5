#!/usr/bin/env bash
# One machine or several, by hand: run this on each, with HEAD the name of one of them and NODES their number.
# `longshift train` alone does the same on one machine.
set -euo pipefail
torchrun --nnodes "${NODES:-1}" --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "${HEAD:-localhost}:29500" --rdzv-id continue \
    -m longshift.cli train examples/continue.yaml layout=dp2.u2.tp2.z2 "$@"
