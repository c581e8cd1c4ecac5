"""One search of a plan in a process of its own: `plan_cases.py NAME` prints what it took as one line of JSON."""

import json
import sys
import time

BEGAN = time.process_time()

import numpy as np  # noqa: E402
from switch_cases import peak_mib  # noqa: E402

from longshift.cluster.files import cluster  # noqa: E402
from longshift.layout.layout import Layout  # noqa: E402
from longshift.planner.shortlist import Problem, compare, shortlist  # noqa: E402
from longshift.planner.task import PlanTask  # noqa: E402
from longshift.schedule.sequence import token_order  # noqa: E402
from longshift.spec.families import preset  # noqa: E402
from longshift.spec.model import ModelSpec, Rope  # noqa: E402
from longshift.weigh.turn_profile import RankSetup, unit_turn  # noqa: E402
from longshift.workload.length_file import Lengths  # noqa: E402

IMPORT_S = time.process_time() - BEGAN

_SETUP = RankSetup(ModelSpec("llama", 61, 64, 1, 4, 2, 16, 97, 64), Layout.parse("dp1"), Layout.parse("dp1").coord(0), 2, "nccl")
unit_turn(_SETUP, token_order((8,), 1, 1), "block", "forward")
FIRST_TURN_S = time.process_time() - BEGAN - IMPORT_S  # torch imports what its kernels without storage need

LLAMA_405B = ModelSpec("llama", 128256, 16384, 126, 128, 8, 128, 53248, 1 << 17, rope=Rope())  # arXiv 2407.21783, table 3
# Lengths of the HotSPa paper's GitHub, as fitted to its table 3: lognormal(6.5, 1.65).
MU, SIGMA = 6.5, 1.65
CASES = {  # model, cluster, tokens of a step, longest document, documents
    "8B on 8": ("llama-3-8b", "8xH100", 1 << 20, 1 << 15, 200_000),
    "8B on 64": ("llama-3-8b", "64xH100", 1 << 22, 1 << 17, 200_000),
    "70B on 512": ("llama-3-70b", "512xH100", 1 << 22, 1 << 15, 200_000),
    "405B on 16,384": ("405B", "16384xH100", 1 << 24, 1 << 17, 200_000),
    "a million lengths": ("llama-3-8b", "8xH100", 1 << 20, 1 << 15, 0),
}


def lengths_of(documents: int, longest: int) -> Lengths:
    """Lengths of documents, longer ones cut; where `documents` is 0, a million different lengths, one document each."""
    if not documents:
        return Lengths(np.arange(8, 1_000_008), np.ones(1_000_000, np.int64))
    drawn = np.random.default_rng(0).lognormal(MU, SIGMA, documents)
    return Lengths.from_array(np.clip(drawn, 8, longest).astype(np.int64))


def row(name: str) -> dict:
    """What a shortlist takes: processor seconds after import, and the process's largest resident size."""
    model, devices, tokens, longest, documents = CASES[name]
    spec = LLAMA_405B if model == "405B" else preset(model)
    lengths, on = lengths_of(documents, longest), cluster(devices)
    task = PlanTask(spec, on, lengths, tokens, "bf16", on.devices)
    began = time.process_time()
    problem = Problem.of(task)
    comparison = compare(problem, task.budget_bytes)
    listed = shortlist(comparison)
    seconds = time.process_time() - began
    singles = [way.seconds for way in listed if len(way.edges) == 1]
    return {
        "case": name,
        "seconds": seconds,
        "candidates": problem.enumeration.total,
        "refused": dict(problem.enumeration.refused),
        "peak_mib": peak_mib(),
        "import_s": IMPORT_S,
        "first_turn_s": FIRST_TURN_S,
        "torch": "torch" in sys.modules,
        "step_s": min((way.seconds for way in listed), default=None),
        "single_s": min(singles, default=None),
    }


if __name__ == "__main__":
    print(json.dumps(row(sys.argv[1])))
