"""Is what `recompute-auto` chooses faster than to compute all again, and than to move all, in the same memory?

At ten budgets between what a step needs that computes all again (`recompute-full`) and what one needs that keeps all, the choice is made by
the ledger's bytes and the clock's seconds, for this machine, and trained beside `recompute-full` and `recompute-full.disk`, in turns; both
fit into every budget. The first round is not counted; ratios are taken within a round.

    half_over          seconds of the better of the two over those of the choice, where half of what all takes is there
    worst_over_better  seconds of the choice over those of the better of the two, at the worst of all budgets
    peak_over_ledger   bytes of tensors counted in a step over the ledger's: the lowest and the highest
    all_fit_layout     what is chosen where all fits: it computes nothing again, and moves nothing
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import home_ranks  # noqa: F401  (what the forked ranks call is imported before they fork)
import ledger_ranks
from common import arguments, publish, say
from in_turn import in_turn
from trial import Trial

from longshift.cluster.cluster import Cluster
from longshift.cluster.files import preset as machine_preset
from longshift.dist.fork import ForkedWorld
from longshift.layout.layout import Layout
from longshift.planner.activations import Activations, choose_activations
from longshift.profile.run import measure_here
from longshift.simulate.clock import Clock, GroupPacks
from longshift.simulate.cost import Cost
from longshift.simulate.rates import rates
from longshift.spec.families import preset

DEADLINE_S = 600.0
BUDGETS = 10
ALL_AGAIN, ALL_MOVED, ALL_KEPT = "recompute-full", "recompute-full.disk", "dp1"


def trial(width: int, layers: int, tokens: int, steps: int) -> Trial:
    """Steps of one document. The model is a Llama of this width with a small vocabulary."""
    how = {"vocab": 512, "width": width, "layers": layers, "heads": 4, "kv_heads": 4, "head_width": width // 4, "ffn": 4 * width}
    spec = replace(preset("tiny-llama"), **how, max_positions=tokens)
    return Trial(spec, ((tokens,),) * steps, precision="float32", capacity=tokens)


def chosen(what: Trial, cluster: Cluster) -> tuple[list[tuple[int, Activations]], dict[str, int]]:
    """Budgets in bytes, and what is chosen for each; and what the ledger says of the three uniform ways."""
    [tokens] = what.lengths[0]

    def bytes_of(way: Layout) -> int:
        return ledger_ranks.predict(what, (way,), 0)[0].device

    def seconds_of(way: Layout) -> float:
        clock = Clock(ledger_ranks.shape_of(what, (way,)), cluster, Cost(what.spec, rates(cluster, "float32")))
        return clock.step([GroupPacks(way, (((tokens,),),))]).seconds

    uniform = {text: bytes_of(Layout.parse(text)) for text in (ALL_AGAIN, ALL_MOVED, ALL_KEPT)}
    least, most = max(uniform[ALL_AGAIN], uniform[ALL_MOVED]), uniform[ALL_KEPT]
    budgets = [least + (most - least) * number // (BUDGETS - 1) for number in range(BUDGETS)]
    asked = Layout.parse("recompute-auto.disk")
    return [(budget, choose_activations(asked, what.spec.layers, budget, bytes_of, seconds_of)[0]) for budget in budgets], uniform


def timed(what: Trial, layouts: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of a step under each layout, by round."""
    how = {"trial": replace(what, lengths=what.lengths[:1]).to_json(), "bandwidth": 1e12}
    with ForkedWorld(1) as world:
        found = in_turn(world, {layout: how | {"layout": layout} for layout in layouts}, rounds)
    return {layout: [answer["seconds"] for answer in answers] for layout, answers in found.items()}


def main() -> int:
    options = arguments("What recompute-auto chooses, beside computing and moving all again.").parse_args()
    what = trial(64, 4, 256, 2) if options.quick else trial(256, 8, 2048, 2)
    cluster = machine_preset("cpu") if options.quick else measure_here(1, True, False, say)
    choices, uniform = chosen(what, cluster)
    layouts = list(dict.fromkeys([ALL_AGAIN, ALL_MOVED, *(str(one.layout) for _, one in choices)]))
    seconds = timed(what, layouts, 2 if options.quick else 5)
    with ForkedWorld(1) as world:
        counted = {text: world.call("ledger_ranks:weigh", DEADLINE_S, trial=what.to_json(), layout=text)[0]["measured"] for text in layouts}
    better = [min(pair) for pair in zip(seconds[ALL_AGAIN], seconds[ALL_MOVED])]
    rows = []
    for budget, one in choices:
        text = str(one.layout)
        over = [slow / fast for slow, fast in zip(better, seconds[text])]
        row = {"budget_mib": budget / 2**20, "layout": text, "step_s": median(seconds[text]), "predicted_s": one.seconds}
        row |= {"better_over": median(over), "again_s": median(seconds[ALL_AGAIN]), "moved_s": median(seconds[ALL_MOVED])}
        rows.append(row | {"peak_mib": counted[text] / 2**20, "peak_over_ledger": counted[text] / one.bytes})
    ratios = [row["peak_over_ledger"] for row in rows]
    half = (uniform[ALL_KEPT] + max(uniform[ALL_AGAIN], uniform[ALL_MOVED])) / 2
    at_half = max((row for row, (budget, _) in zip(rows, choices) if budget <= half), key=lambda row: row["budget_mib"])
    summary = {
        "half_over": at_half["better_over"],
        "half_layout": at_half["layout"],
        "worst_over_better": max(1 / row["better_over"] for row in rows),
        "peak_over_ledger": [min(ratios), max(ratios)],
        "all_fit_layout": rows[-1]["layout"],
        "within_budget": all(row["peak_mib"] <= row["budget_mib"] for row in rows),
    }
    publish("activations", summary, rows, options.json)
    return 0 if summary["within_budget"] else 1


if __name__ == "__main__":
    sys.exit(main())
