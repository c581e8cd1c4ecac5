"""What three planners make of nine published switches, and how long it takes to plan them and switches of 70B on 1,024 ranks.

Every plan is made in a process of its own, which imports no torch: `plan_s` is its clock from two layouts to the digest, `plan_cpu_s` its
processor time, `peak_mib` its largest resident size, interpreter and numpy included. `--quick` plans three of the nine.

The published numbers know no buckets; the rows with `bucket_mib` say what playing a plan in buckets costs, its weights turn about.
"""

import json
import subprocess
import sys
from pathlib import Path

from common import arguments, publish, say
from switch_cases import LARGE, PLANNERS, PUBLISHED, Published

from longshift.layout.layout import Layout

BUCKET_BYTES = 256 * 2**20
TOLERANCE = 0.03  # of a published number, beside half its last digit


def fresh(model: str, src: Layout, dst: Layout, side: str, planner: str, bucket_bytes: int | None) -> dict:
    """`switch_cases.row` in a new process."""
    words = [model, str(src), str(dst), side, planner, str(bucket_bytes or 0)]
    say(*words)
    script = Path(__file__).with_name("switch_cases.py")
    return json.loads(subprocess.run([sys.executable, script, *words], stdout=subprocess.PIPE, check=True).stdout)


def compared(case: Published, planner: str) -> tuple[dict, list[str]]:
    """A row beside the published numbers, and where they differ."""
    found = fresh(case.model, *case.layouts, "copies", planner, None)
    published = {"algorithm1": (case.inter_node_gb, case.algorithm1_s), "fan_out": (case.least_gb, case.fan_out_s)}.get(planner)
    if published is None:
        return found, []
    found["published_inter_node_gb"], found["published_bound_s"] = published
    pairs = ((found["inter_node_gb"], published[0], 0.5), (found["bound_s"], published[1], 0.0005))
    differs = any(abs(ours - theirs) > half + TOLERANCE * theirs for ours, theirs, half in pairs)
    words = f"{case.model} {case.src} -> {case.dst} {planner}: {found['bound_s']:.3f} s, published {published[1]} s"
    return found, [words] * differs


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    rows, differ = [], []
    for case in PUBLISHED[:: 4 if args.quick else 1]:
        for planner in PLANNERS:
            row, words = compared(case, planner)
            rows.append(row)
            differ += words
        if not args.quick:
            rows += [fresh(case.model, *case.layouts, "copies", planner, BUCKET_BYTES) for planner in PLANNERS]
    summary = {"plan_s_32b_32": max(r["plan_s"] for r in rows if r["model"] == "32B"), "published_that_differ": differ}
    if not args.quick:
        large = [fresh(*case[:4], planner, case[4]) for case in LARGE for planner in PLANNERS]
        rows += large
        for key in ("plan_s", "plan_cpu_s", "peak_mib"):
            summary[f"{key}_70b_1024"] = max(r[key] for r in large)
    publish("switch_plan", summary, rows, args.json)


if __name__ == "__main__":
    main()
