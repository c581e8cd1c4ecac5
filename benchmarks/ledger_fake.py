"""Rows of `ledger.py` at the width of Llama 3 8B, two of its layers, on a device that is not there: one rank, alone or of eight whose
collectives do nothing. Prints a list of them. `--words`: few, which have every word of a layout among them, of short documents."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from ledger_ranks import Counted, apart, predict, row_of
from torch.testing._internal.distributed.fake_pg import FakeStore
from trial import Trial

from longshift.dist.world import World
from longshift.documents.batch import Document, StepBatch
from longshift.layout.layout import Layout
from longshift.schedule.chunks import StreamOptions
from longshift.spec.model import ModelSpec, Rope
from longshift.spec.rule import Rule
from longshift.state.home import Home
from longshift.state.optimizer import Optimizer, Schedule
from longshift.state.precision import Precision
from longshift.step.player import Player
from longshift.step.update import State, train_step
from longshift.switch.options import SwitchOptions
from longshift.workload.groups import Edge

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

from fake_device import NAME, Held, fake_device

K = 1024
SPEC = ModelSpec("llama", 128256, 4096, 2, 32, 8, 128, 14336, 1024 * K, rope=Rope(theta=500000.0))
ALONE = {
    "dp1": (8 * K, 3 * K),
    "recompute-selective": (8 * K, 3 * K),
    "recompute-full": (32 * K, 5 * K),
    "recompute-full.host": (32 * K,),
    "chunk16K.host": (64 * K,),
    "chunk16K.host.kv-offload": (64 * K, 20 * K),
    "chunk16K.host.kv-offload.fpdt": (64 * K,),
    "chunk16K.host.every2": (64 * K,),
}
OF_EIGHT = {
    "dp8.z1": (8 * K,) * 8,
    "dp8.z2": (8 * K,) * 16,
    "dp8.z3": (8 * K, 3 * K) * 8,
    "dp8.z3.recompute-full": (8 * K, 3 * K) * 8,
    "tp8": (8 * K, 3 * K),
    "tp8.recompute-selective": (8 * K, 3 * K),
    "u8": (64 * K, 3 * K),
    "ring8": (64 * K, 3 * K),
    "ring8.z3.recompute-full": (64 * K, 3 * K),
    "u8.z3.chunk16K.host.kv-offload": (64 * K,),
    "pp2.tp4": (8 * K, 3 * K) * 2,
    "pp2.dp4.z2": (8 * K,) * 8,
    "pp2.dp2.tp2.z3.recompute-full": (8 * K, 3 * K) * 4,
    "pp2.ring2.u2.z3.chunk16K.host": (64 * K,) * 2,
}
# Every word that docs/reference/layout.md explains, but for chunk-auto and recompute-auto, which become something else.
WORDS_ALONE = {
    "recompute-full.host": (2 * K, K),
    "recompute-full.keep1.host": (2 * K, K),
    "chunk1K.host.every2": (2 * K,),
    "chunk1K.host.kv-offload.fpdt": (2 * K,),
    "chunk1K.disk.kv-offload": (2 * K,),
    "recompute-full.disk": (2 * K, K),
}
WORDS_OF_EIGHT = {
    "dp8.z1.recompute-selective": (2 * K, K) * 8,
    "dp2.tp4.z2.recompute-full": (2 * K, K),
    "ring2.u4.z3.recompute-full": (2 * K, K),
    "dp8.z3.vertical": (K,) * 64,
    "pp2:1-1.dp2.tp2.gpipe": (K,) * 4,
    "pp2.v2.tp4": (K,) * 2,
    "pp2.ring2.u2.z3.chunk1K.host.kv-offload": (2 * K,) * 2,
}


def weigh(text: str, lengths: tuple[int, ...], rank: int, trace: bool = False) -> dict:
    """A row: the second of two equal steps, in bf16."""
    layout, precision = Layout.parse(text), Precision.of("bf16")
    spec = replace(SPEC, layers=max(SPEC.layers, layout.pp * layout.virtual))
    capacity, after = max(lengths) + 3 * K, list[int]()
    trial = Trial(spec, (lengths,) * 2, "bf16", capacity=capacity)
    if layout.world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        with fake_device() as (device, held):
            world = World(rank, layout.world, device)
            with Counted(world) as counted:
                home = Home(spec, layout, world, precision, lambda name, box: torch.empty(box.shape), rule=Rule())
                state = State(spec, home, Optimizer(home, Rule()), Schedule(1e-4, 1000, 0.0, 1), 1.0)
                player = Player(spec, [Edge(capacity, layout)], world, home, precision, SwitchOptions(), StreamOptions())
                documents = tuple(Document(np.zeros(n, np.int64), np.zeros(n, np.int64)) for n in lengths)
                train_step(state, StepBatch(documents, sum(lengths), 0, 1), player)
                held.restart()
                counted.restart()
                if trace:
                    player.after = lambda op: after.append(held.now[NAME])
                train_step(state, StepBatch(documents, sum(lengths), 0, 1), player)
                found = {"measured": held.most[NAME], "sent": counted.told(), "records": {}, "flops": _work(held)}
            player.close()
    finally:
        if layout.world > 1:
            dist.destroy_process_group()
    weighed, said = predict(trial, (layout,), rank, "nccl")
    name = {"device": "fake", "family": "llama-3-8b", "layout": text, "precision": "bf16", "lengths": lengths, "rank": rank}
    row = row_of(name, found, weighed)
    row |= {"flops": found["flops"], "flops_predicted": weighed.flops}
    return row | ({"alive": weighed.peaks["device"].alive, "apart": apart(after, said)} if trace else {})


def _work(held: Held) -> int:
    """FLOPs of matmuls and attention."""
    return held.work["matmul_flops"] + held.work["attention_flops"]


def main() -> None:
    traced_too, few = "--trace" in sys.argv, "--words" in sys.argv
    alone, of_eight = (WORDS_ALONE, WORDS_OF_EIGHT) if few else (ALONE, OF_EIGHT)
    some = [(text, lengths, 0) for text, lengths in alone.items()] + [(text, lengths, 5) for text, lengths in of_eight.items()]
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    rows = []
    for case in some:
        if words and case[0] not in words:
            continue
        row = weigh(*case, trace=traced_too)
        print(
            f"{row['layout']}: {row['ratio']:.4f}",
            "" if row["sent"] == row["sent_predicted"] else (row["sent"], row["sent_predicted"]),
            file=sys.stderr,
        )
        for name in ("alive", "apart") if traced_too else ():
            print(*row[name], sep="\n", file=sys.stderr)
        rows.append(row)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
