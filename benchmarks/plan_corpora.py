"""Where does changing layouts inside a step pay? Plans for three models on clusters, three corpora and three longest lengths.

A row has the seconds of a step on the clock: of the best plan (`auto`), of the best single layout, of the best whose layouts differ in
context parallelism alone, and of the best single layout when every document is padded to the next power of two (`padded`, at least 1K).
All compute the same documents. Nothing is measured: what a GPU reaches is `cluster/presets` and what others published. Cases are
planned side by side, a process a core.
"""

import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
from common import arguments, publish, say

from longshift.cluster.files import cluster
from longshift.cluster.host import core_count
from longshift.layout.layout import format_size
from longshift.planner.search import search
from longshift.planner.task import PlanTask
from longshift.spec import families
from longshift.spec.model import ModelSpec
from longshift.step_report import on_cluster
from longshift.workload.length_file import Lengths, read_lengths
from longshift.workload.lengths import spans

CORPORA = ("github", "pretraining", "wikipedia")
LONGEST = (1 << 15, 1 << 17, 1 << 20)
TOKENS = 1 << 22  # a step, and twice the longest document where that is more
LEAST_BUCKET = 1 << 10
FOLDER = Path(__file__).parents[1] / "examples" / "lengths"


def hotspa_32b() -> ModelSpec:
    """The 32B model of HotSPa's Table 3, as Hydraulis builds it."""
    config = {"model_type": "llama", "vocab_size": 30592, "hidden_size": 6656, "num_hidden_layers": 60, "num_attention_heads": 64}
    return families.from_hugging_face(config | {"intermediate_size": 17920, "max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-5})


CASES = (("32B", hotspa_32b, "4x8xa800"), ("8B", lambda: families.preset("llama-3-8b"), "64xh100"),
         ("70B", lambda: families.preset("llama-3-70b"), "64xh100"))  # fmt: skip


def split(found: Lengths, longest: int) -> Lengths:
    """Documents cut into pieces of at most `longest` tokens."""
    pieces = spans(found.lengths, longest, "split")
    known, where = np.unique(pieces.stop - pieces.start, return_inverse=True)
    return Lengths(known, np.bincount(where, found.counts[pieces.document]).astype(np.int64))


def padded(found: Lengths) -> Lengths:
    """Documents padded to the next power of two."""
    ends = np.maximum(LEAST_BUCKET, 1 << np.ceil(np.log2(found.lengths)).astype(np.int64))
    known, where = np.unique(ends, return_inverse=True)
    return Lengths(known, np.bincount(where, found.counts).astype(np.int64))


def row(case: int, corpus: str, longest: int) -> dict:
    """One row: of a case of CASES, by its number."""
    name, model, on = CASES[case]
    began, spec = time.perf_counter(), model()
    lengths = split(read_lengths(FOLDER / f"{corpus}.csv"), longest)
    tokens, machine = max(TOKENS, 2 * longest), cluster(on)
    task = PlanTask(spec, on_cluster(machine, machine.devices), lengths, tokens, "bf16", machine.devices)
    found = search(task)
    told = {"model": name, "on": on, "corpus": corpus, "longest": longest, "tokens": tokens, "candidates": found.num_candidates}
    if found.best is None:
        return told | {"changes": list(found.changes), "planned_s": time.perf_counter() - began}
    wide = padded(lengths)
    apart = PlanTask(
        spec, task.cluster, wide, int(tokens * wide.tokens / wide.documents * lengths.documents / lengths.tokens), "bf16", task.world
    )
    baseline = search(apart, single=True).single
    others = {"single": found.single, "context_parallel": found.context_parallel, "padded": baseline}
    return told | {
        "auto": str(found.best),
        "groups": len(found.best.edges),
        "auto_s": found.best.seconds,
        **{f"{key}_s": way.seconds if way else None for key, way in others.items()},
        **{key: str(way) if way else None for key, way in others.items()},
        **{f"{key}_over_auto": way.seconds / found.best.seconds if way else None for key, way in others.items()},
        "tokens_per_s": tokens / found.best.seconds,
        "planned_s": time.perf_counter() - began,
    }


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    cases = [(1, "github", LONGEST[0])] if args.quick else list(product(range(len(CASES)), CORPORA, LONGEST))
    rows = []
    with ProcessPoolExecutor(core_count()) as pool:
        for found in pool.map(row, *zip(*cases)):
            rows.append(found)
            told = f"{found['model']} {found['on']} {found['corpus']} {format_size(found['longest'])}"
            say(f"{told}: {found.get('auto', 'nothing fits')}, {found.get('single_over_auto')}")
    gains = [one["single_over_auto"] for one in rows if one.get("single_over_auto")]
    publish("plan_corpora", {"most_gain": max(gains), "least_gain": min(gains)}, rows, args.json)


if __name__ == "__main__":
    main()
