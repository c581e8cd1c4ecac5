"""What a switch of bfloat16 weights costs from each layout to each other one, alone, against the bytes over the bandwidth of the links: the
cost matrix of HotSPa's Figure 8, by planner.

    measured_s   all exchanges of the plan, packing included, until every rank has its weights; median of repeats, all plans in another
                 order each time
    bound_s      the plan's busiest link at its bandwidth (`switch.traffic`): what one all-to-all between the same ranks reached, measured
                 in turn with the plans. On a plain machine with all pairs alike and as many bytes as the plan's; on a scale model with as
                 many as the mean plan's, once inside the nodes only and once between them only
    asked_s      on a scale model, the same with what was asked of the shaped links
    ready_s      one all-to-all of the plan's own bytes from rank to rank, out of ready buffers: what packing and buckets add is the rest

The sources are the copies of the layout before, without home's help. Pairs between which nothing moves have no row.
"""

import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import permutations

import torch
from common import arguments, publish, say
from static import spread
from switch_cases import PLANNERS
from trial import Trial
from worlds import Machine, machine

from longshift.dist.collectives import Group
from longshift.dist.world import World
from longshift.layout.layout import Layout
from longshift.spec.model import ModelSpec
from longshift.state.home import Home
from longshift.state.initial_weights import random_source
from longshift.state.precision import Precision
from longshift.state.transfer import SwitchTransfer
from longshift.state.visit import copies_of
from longshift.switch.itinerary import Cut
from longshift.switch.links import Links, assumed
from longshift.switch.options import SwitchOptions
from longshift.switch.plan import Plan, switch_plan
from longshift.switch.spread import spread_weights, turn_about
from longshift.switch.traffic import traffic

LAYOUTS = {
    2: ("dp2", "tp2", "pp2"),
    4: ("dp4", "tp4", "pp4", "dp2.tp2", "pp2.dp2", "pp2.tp2"),
    8: ("dp8", "dp2.tp4", "tp8", "pp2.dp2.tp2", "pp2.tp4"),
}
FEW = ("dp4", "tp4", "pp2.dp2")  # to be quick
PLAIN = ("ranks=4", "ranks=8")
DEADLINE_S = 580.0


@dataclass
class Times:
    """Seconds of one plan and of the all-to-alls beside it, by repeat. Mutable."""

    plan: list[float]
    ready: list[float]
    alike: list[float]
    near: list[float]
    far: list[float]


# In the ranks


def measure(
    world: World,
    trial: str,
    repeats: int,
    per_node: int,
    bucket_bytes: int,
    kinds: list[str],
    layouts: list[str],
) -> list[dict]:
    """Of every plan of `plans`, in their order. The first repeat is not counted."""
    what = Trial.from_json(json.loads(trial))
    world.per_node = per_node
    everyone = tuple(range(world.size))
    world.prepare([everyone], "switch")
    group = world.group(everyone, "switch")
    precision = Precision.of("bf16")
    home_cut = replace(Layout.parse(layouts[0]), zero=1)
    home = Home(what.spec, home_cut, world, precision, lambda _, box: torch.zeros(box.shape))
    source = random_source(what.spec, 0, precision.compute)
    stops = {text: copies_of(what.spec, Cut(Layout.parse(text), "copies", False), world, home, precision) for text in layouts}
    for stop in stops.values():
        for unit in stop.units:
            stop.open(unit)
        for name, boxes in stop.boxes.items():
            for box in boxes:
                stop.part(name, box).copy_(source(name, box))  # pyright: ignore[reportOptionalMemberAccess]
    played = [
        SwitchTransfer(plan, world, group, stops[src].part, stops[dst].part, precision.compute)
        for src, dst, plan in plans(what.spec, layouts, per_node, bucket_bytes)
    ]
    mean = sum(int(transfer.plan.bytes_by_pair.sum()) for transfer in played) // len(played)
    found = [Times([], [], [], [], []) for _ in played]
    for number in range(repeats + 1):
        for turn in random.Random(number).sample(range(len(played)), len(played)):  # the first of a few to one target pays for its memory
            transfer, times = played[turn], found[turn]
            pairs = torch.from_numpy(transfer.plan.bytes_by_pair)
            alike = torch.full_like(pairs, int(pairs.sum()) // (world.size * (world.size - 1))).fill_diagonal_(0)
            runs = {kind: _ready(group, level_pairs(kind, world.size, per_node, mean)) for kind in ("near", "far") if kind in kinds}
            runs |= {"plan": partial(_play, transfer), "ready": _ready(group, pairs), "alike": _ready(group, alike)}
            for kind in runs:
                if kind not in kinds or (kind in ("near", "far") and transfer is not played[0]):
                    continue
                world.everyone.all_reduce(torch.zeros(1))
                began = time.perf_counter()
                runs[kind]()
                world.everyone.all_reduce(torch.zeros(1))
                if number:
                    getattr(times, kind).append(time.perf_counter() - began)
    return [asdict(times) for times in found]


def _play(transfer: SwitchTransfer) -> None:
    for number in range(transfer.plan.exchanges):
        transfer.post(number)
        transfer.take_in(number)


def _ready(group: Group, pairs: torch.Tensor):
    """One all-to-all of these bytes from rank to rank."""
    ins, outs = pairs[group.index].tolist(), pairs[:, group.index].tolist()
    out, x = torch.zeros(sum(outs), dtype=torch.uint8), torch.ones(sum(ins), dtype=torch.uint8)
    return lambda: group.trade(out, x, outs, ins).wait()


# Plans


def level_pairs(level: str, ranks: int, per_node: int, total: int) -> torch.Tensor:
    """Bytes from rank to rank, alike inside the nodes ("near") or between them ("far"): `total` together."""
    node = torch.arange(ranks) // per_node
    pairs = (node[:, None] == node) == (level == "near")
    pairs.fill_diagonal_(False)
    return pairs * (total // int(pairs.sum()))


def plans(spec: ModelSpec, layouts: Sequence[str], per_node: int, bucket_bytes: int) -> Iterator[tuple[str, str, Plan]]:
    """(from, to, plan) of all pairs and planners between which something moves."""
    links = assumed(per_node)
    for src, dst in permutations(layouts, 2):
        held = spread_weights(spec, Layout.parse(src), "copies")
        wanted = turn_about(held, spread_weights(spec, Layout.parse(dst), "copies"))
        for planner in PLANNERS:
            plan = switch_plan(held, wanted, links, torch.bfloat16.itemsize, planner, bucket_bytes)
            if plan.bytes_by_pair.any():
                yield src, dst, plan


def rows_of(place: Machine, spec: ModelSpec, layouts: Sequence[str], repeats: int, bucket_bytes: int) -> list[dict]:
    kinds = ["plan", "ready", "near", "far"] if place.model else ["plan", "ready", "alike"]
    with place.world() as world:
        told = {"kinds": kinds, "layouts": layouts} | {
            "trial": json.dumps(Trial(spec, ()).to_json()),
            "repeats": repeats,
            "per_node": place.per_node,
            "bucket_bytes": bucket_bytes,
        }
        ranks = world.call("switch_cost:measure", DEADLINE_S, **told)
    every = list(plans(spec, layouts, place.per_node, bucket_bytes))
    each = sum(int(plan.bytes_by_pair.sum()) for *_, plan in every) // len(every) / place.ranks
    rows = []
    for number, (src, dst, plan) in enumerate(every):
        slowest = {kind: [max(values) for values in zip(*(rank[number][kind] for rank in ranks))] for kind in kinds}
        total = int(plan.bytes_by_pair.sum())
        measured_s = statistics.median(slowest["plan"])
        if place.model is None:
            near = far = total / place.ranks / statistics.median(slowest["alike"])
        else:
            near, far = (each / statistics.median(map(max, zip(*(rank[0][level] for rank in ranks)))) for level in ("near", "far"))
        moved = traffic(replace(plan, links=Links(place.per_node, near, far)))
        rows.append(
            {
                "machine": place.kind,
                "ranks": place.ranks,
                "nodes": place.ranks // place.per_node,
                "src": src,
                "dst": dst,
                "planner": plan.planner,
                "bytes": total,
                "inter_node_bytes": moved.inter_node_bytes,
                "exchanges": plan.exchanges,
                "measured_s": measured_s,
                "spread": spread(slowest["plan"]),
                "bound_s": moved.bound_s,
                "fraction_of_bound": moved.bound_s / measured_s,
                "ready_s": statistics.median(slowest["ready"]),
                "links_mb_s": [near / 1e6, far / 1e6],
                "asked_s": traffic(replace(plan, links=asked)).bound_s if (asked := _asked(place)) else None,
            }
        )
    return rows


def _asked(place: Machine) -> Links | None:
    return Links(place.per_node, place.model.intra_bytes_per_s, place.model.inter_bytes_per_s) if place.model else None


def medians(rows: Sequence[dict], key: str) -> dict[str, dict[str, float]]:
    """By planner, then by machine and ranks."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        value = row[key] if key in row else row["ready_s"] / row["measured_s"]
        for where in ("all", f"{row['machine']} {row['ranks']}"):
            found.setdefault(row["planner"], {}).setdefault(where, []).append(value)
    return {planner: {where: statistics.median(values) for where, values in some.items()} for planner, some in found.items()}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--plain", action="append", default=[], metavar="SIZES", help="such as ranks=4; may be repeated")
    parser.add_argument(
        "--scale-model", action="append", default=[], metavar="SIZES", help='"nodes=2,per_node=2,cpu=0.5,like=a800,shrink=4"'
    )
    parser.add_argument("--width", type=int, default=640, help="of the model, of four layers")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--bucket-mib", type=float, default=SwitchOptions.bucket_bytes / 2**20)
    options = parser.parse_args()
    places = [*options.plain, *options.scale_model] or list(PLAIN)
    if options.quick:
        options.width, options.repeats, places = 128, 2, ["ranks=4"]
    spec = ModelSpec("llama", 2048, options.width, 4, 8, 8, options.width // 8, options.width * 43 // 16, 4096)
    rows = []
    for description in places:
        with machine(description) as place:
            say(description)
            layouts = FEW if options.quick else LAYOUTS[place.ranks]
            rows += rows_of(place, spec, layouts, options.repeats, int(options.bucket_mib * 2**20))
    fractions = medians(rows, "fraction_of_bound")
    summary = {"fraction_of_bound_median": {planner: some["all"] for planner, some in fractions.items()}}
    summary |= {"fraction_by_machine": fractions, "ready_share_by_machine": medians(rows, "ready_share")}
    publish("switch_cost", summary, rows, options.json)


if __name__ == "__main__":
    main()
