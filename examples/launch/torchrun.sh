#!/usr/bin/env bash
# One machine or several, by hand: run this on each, with HEAD the name of one of them, NODES their number and GPUS those of each. There are as
# many replicas as the GPUs make, each of four: two Ulysses ranks of two tensor-parallel ones. `longshift train` alone does the same on one machine.
set -euo pipefail
nodes=${NODES:-1} gpus=${GPUS:-8}
torchrun --nnodes "$nodes" --nproc-per-node "$gpus" --rdzv-backend c10d --rdzv-endpoint "${HEAD:-localhost}:${PORT:-29500}" --rdzv-id continue \
    -m longshift.cli train examples/continue.yaml "layout=dp$((nodes * gpus / 4)).u2.tp2.z2" "$@"
