"""Real documents on hot switching, on every static layout, and on torch FSDP2: tokens a second, interleaved, and the best of them under
memory budgets that the longest document does not leave one rank to compute it alone.

    static:LAYOUT          one layout; documents packed without padding up to the longest length there may be
    static-padded:LAYOUT   one layout; each document padded to its bucket's end, as static systems with buckets do (those of the shortest
                           bucket are packed): a bucket is a length group
    hot                    each length group under a layout of its own
    fsdp2:STAGE            torch's fully_shard, documents packed as for static

Three steps a machine:
1. *Probe.* Each mesh of layouts with full packs, from the shortest group to the longest, until one needs more than the largest budget; for
   the longer ones the next of `--policies` is tried.
2. *Warm-up*, once a corpus. All static layouts that fit, and some assignments of layouts to groups that the probes say are best: each
   batch once. A scheme fits a budget if no rank's peak is above it: resident memory beyond what the process held before the model was
   built, where freed memory of 1 MiB and more goes back at once. Hot switching is the best of what fits, be it one single layout.
3. *Rounds.* For each budget the best that fit it, all interleaved; each scheme has its own processes. What hot switching and the best
   static layout are is chosen in the even rounds, by medians; their ratios are of the odd ones, each taken within a round, so that the
   choice favours nobody.

The model is `--shrink` times narrower than Llama 7B and has few layers, text is cut to 1/shrink, up to 32K/shrink: see
`scale_model` for what stays the same. A step's lengths are a stratified draw, for a small step to have the long documents that a large one
has. `--lengths FILE`: one document's tokens a line, gzip or plain; its documents are cut from the same corpus.
"""

import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path

import peers.fsdp2  # noqa: F401  (what the forked ranks call is imported before they fork)
import scale_model
from common import GIVE_BACK, arguments, publish, say
from hot_ranks import REAL_LONGEST, Pairs
from static import spread
from trial import Trial
from worlds import Machine, SleepingWorld, machine

from longshift.dist.fork import ForkedWorld
from longshift.layout.layout import Layout
from longshift.layout.legal import faults
from longshift.layout.placement import buckets
from longshift.spec.model import ModelSpec
from longshift.workload.groups import Edge, length_groups

DEADLINE_S = 240.0
PLAIN = "ranks=2"
NO_HOLES = 1 << 20  # bytes that are given back when they are freed
TINY = 16  # tokens
REAL_WIDTH, HEAD_WIDTH = 4096, 128
POLICIES = ("z1", "z2", "z3", "z1.recompute-full", "z3.recompute-full")
Rates = Mapping[int, float]  # tokens a second, by group


@dataclass(frozen=True)
class Scheme:
    """`groups`: (upto, layout) of each length group, one for a static scheme."""

    name: str
    system: str
    groups: tuple[tuple[int, str], ...]
    padded: bool = False

    @property
    def steps(self) -> str:
        """Which file it trains on."""
        return "padded" if self.padded else "plain"

    @property
    def first(self) -> str:
        """What it begins with, for connections, plans and memory to be there: every group is visited."""
        return "first" if len(self.groups) == 1 else "first of each"

    def __str__(self) -> str:
        return " > ".join(f"{upto}: {layout}" for upto, layout in self.groups)


@dataclass
class Probed:
    """What a layout does with full packs of each group, up to the last that fits, beyond the seconds of a step of next to no tokens.
    Mutable."""

    fixed_s: float = 0.0
    tokens_per_s: list[float] = field(default_factory=list)
    peak_mib: list[float] = field(default_factory=list)


@dataclass
class MeasuredStep:
    """A scheme's steps. Mutable."""

    rates: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    peak_mib: float = 0.0
    visited: list[dict] = field(default_factory=list)

    def add(self, done: dict, tokens: int) -> None:
        """A step of that many tokens."""
        self.rates.append(tokens / done["seconds"])
        self.exposed.append(done["exposed_s"] / done["seconds"])
        self.peak_mib = max(self.peak_mib, done["peak_mib"])
        self.visited = done["visited"]


@dataclass(frozen=True)
class Work:
    """What is trained on one machine. `budgets_mib`: ascending; the last may be infinite."""

    spec: ModelSpec
    ends: tuple[int, ...]
    budgets_mib: tuple[float, ...]
    machine: Machine
    scratch: Path
    trial: str

    @property
    def longest(self) -> int:
        return self.ends[-1]

    def file(self, name: str, documents: Sequence[Pairs]) -> str:
        """Steps of (ids, labels) for the ranks."""
        path = self.scratch / f"{name}.json"
        path.write_text(json.dumps(documents))
        return str(path)


# What is computed, and where


def meshes(spec: ModelSpec, ranks: int) -> list[Layout]:
    """Every way to cut the model over all ranks."""
    degrees = [d for d in range(1, ranks + 1) if ranks % d == 0]
    found = [
        Layout(**dict(zip(("dp", "pp", "tp", "ulysses", "ring"), degree))) for degree in product(degrees, repeat=5) if prod(degree) == ranks
    ]
    return [layout for layout in found if not faults(spec, layout, ranks)]


def under(policies: Sequence[str], mesh: Layout) -> Iterator[str]:
    """The mesh under each policy; sharding needs copies to shard."""
    copies = mesh.dp * mesh.ulysses * mesh.ring
    for policy in policies:
        if copies > 1 or policy.startswith("z1"):
            yield f"{mesh}.{policy}"


def in_papers_family(layout: str) -> bool:
    """Data, tensor and pipeline parallelism, ZeRO and recomputation."""
    parsed = Layout.parse(layout)
    return parsed.ulysses == parsed.ring == 1


def document(length: int) -> tuple[list[int], list[int]]:
    """Where only its length matters."""
    return [1] * length, [2] * length


def padded(documents: Pairs, ends: Sequence[int]) -> Pairs:
    """Documents that are longer than the first end, up to the next end; what is added is no target."""
    found = []
    for ids, labels in documents:
        more = min(end for end in ends if end >= len(ids)) - len(ids) if len(ids) > ends[0] else 0
        found.append((ids + [0] * more, labels + [-100] * more))
    return found


# Measuring


def step(work: Work, world: SleepingWorld, scheme: Scheme, path: str, number: int, give_back: int = GIVE_BACK) -> dict:
    """One update; the slowest rank's seconds and the largest peak."""
    told = {"system": scheme.system, "groups": scheme.groups, "path": path, "number": number, "give_back": give_back}
    ranks = world.call("hot_ranks:update", DEADLINE_S, **told, trial=work.trial, per_node=work.machine.per_node)
    slowest = max(ranks, key=lambda rank: rank["seconds"])
    return slowest | {key: max(rank[key] for rank in ranks) for key in ("peak_mib", "exposed_s")}


def probe(work: Work, layout: str, first: int) -> Probed:
    """Groups from number `first` on: a step of one full pack a replica, of two stages two."""
    parsed, found = Layout.parse(layout), Probed()
    packs = parsed.dp * parsed.pp
    scheme = Scheme(layout, "longshift", tuple((end, layout) for end in work.ends))
    with work.machine.world() as world:
        for number, end in enumerate((TINY, TINY, *work.ends[first:])):
            path = work.file(f"probe-{end}-{packs}", [[document(end)] * packs])
            done = step(work, world, scheme, path, 0)
            if done["peak_mib"] > work.budgets_mib[-1]:
                break
            if number < 2:
                found.fixed_s = done["seconds"]
            else:
                found.tokens_per_s.append(packs * end / max(done["seconds"] - found.fixed_s, done["seconds"] / 10))
                found.peak_mib.append(done["peak_mib"])
    return found


def probe_all(work: Work, asked: Sequence[str], policies: Sequence[str]) -> tuple[dict[str, Rates], dict[str, float]]:
    """Tokens a second of a layout, by group, of those groups that fit, a later policy only for groups that no earlier one fits; and every
    layout's seconds without tokens."""
    found: dict[str, Rates] = {}
    fixed_s: dict[str, float] = {}
    for mesh in meshes(work.spec, work.machine.ranks):
        if asked and str(mesh) not in asked:
            continue
        first = 0
        for layout in under(policies, mesh):
            probed = probe(work, layout, first)
            found[layout], fixed_s[layout] = dict(enumerate(probed.tokens_per_s, first)), probed.fixed_s
            rates = ", ".join(f"{rate:.0f}" for rate in probed.tokens_per_s)
            peak_mib = max(probed.peak_mib, default=0.0)
            say(f"probe {layout}: {probed.fixed_s:.2f} s, groups from {first} at {rates or 'nothing'} tokens/s, up to {peak_mib:.0f} MiB")
            first += len(probed.tokens_per_s)
            if first == len(work.ends):
                break
    return found, fixed_s


def assignments(work: Work, rates: Mapping[str, Rates], fixed_s: Mapping[str, float], lengths: Sequence[int], most: int) -> list[Scheme]:
    """The fastest by the probes: at all; of layouts that all cut the model alike, whose switches are free; of the paper's family; and of
    those with two layouts. Groups without documents take their neighbour's."""
    counts = {group.hi: group for group in length_groups(lengths, [Edge(end, Layout()) for end in work.ends], work.spec)}

    def seconds(number: int, layout: str) -> float:
        end = work.ends[number]
        if end not in counts:
            return 0.0
        dp = Layout.parse(layout).dp
        (group,) = length_groups([n for n in lengths if counts[end].lo < n <= end], [Edge(end, Layout(dp=dp))], work.spec)
        return sum(lengths[i] for i in counts[end].documents) / rates[layout][number] / group.balance

    choices = [[layout for layout in rates if number in rates[layout]] for number in range(len(work.ends))]
    choices = [sorted(some, key=lambda layout, n=number: seconds(n, layout))[:6] for number, some in enumerate(choices)]
    cut = {layout: buckets(work.spec, replace(Layout.parse(layout), zero=1)) for layout in rates}

    def total(each: Sequence[str]) -> float:
        """Every cut of the model gathers its weights and brings its gradients home once."""
        return sum(seconds(n, layout) for n, layout in enumerate(each)) + sum({cut[layout]: fixed_s[layout] for layout in each}.values())

    ranked = sorted((total(each), each) for each in product(*choices))
    found: dict[tuple[str, ...], None] = {}
    kinds = (
        lambda each: True,
        lambda each: len({cut[layout] for layout in each}) == 1,
        lambda each: all(in_papers_family(layout) for layout in each),
        lambda each: len(set(each)) == 2,
    )
    for kind in kinds:
        for _, each in [pair for pair in ranked if kind(pair[1])][: most // len(kinds)]:
            found[each] = None
    return [Scheme(f"assigned-{n}", "longshift", _merged(work.ends, each)) for n, each in enumerate(found)]


def parse_groups(text: str) -> tuple[tuple[int, str], ...]:
    """From "2048: dp4.z1 > 8192: u4.z1"."""
    pairs = (item.split(":") for item in text.split(">"))
    return tuple((int(upto), layout.strip()) for upto, layout in pairs)


def _merged(ends: Sequence[int], layouts: Sequence[str]) -> tuple[tuple[int, str], ...]:
    """Neighbouring groups under one layout are one group."""
    pairs = list(zip(ends, layouts))
    return tuple(pair for pair, after in zip(pairs, [*pairs[1:], None]) if after is None or after[1] != pair[1])


def warm_up(work: Work, schemes: Sequence[Scheme], paths: Mapping[str, str], tokens: Sequence[int]) -> dict[Scheme, MeasuredStep]:
    """Every batch under every scheme, each in processes that last no longer. Peaks are what a scheme needs, and no holes in the C library's
    heap; that takes page faults, so speeds are of the rounds."""
    found = {}
    for scheme in schemes:
        found[scheme] = measured = MeasuredStep()
        with work.machine.world() as world:
            step(work, world, scheme, paths[scheme.first], 0, NO_HOLES)
            for number, count in enumerate(tokens):
                measured.add(step(work, world, scheme, paths[scheme.steps], number, NO_HOLES), count)
        rates = ", ".join(f"{rate:.0f}" for rate in measured.rates)
        say(f"warm-up {scheme.name} {scheme}: {rates} tokens/s, {measured.peak_mib:.0f} MiB")
    return found


def rounds(
    work: Work, schemes: Sequence[Scheme], paths: Mapping[str, str], tokens: Sequence[int], count: int
) -> dict[Scheme, MeasuredStep]:
    """A step of every scheme in turn, each round from another one on."""
    found = {scheme: MeasuredStep() for scheme in schemes}
    with ExitStack() as stack:
        worlds = {scheme: stack.enter_context(work.machine.world()) for scheme in schemes}
        for scheme, world in worlds.items():
            step(work, world, scheme, paths[scheme.first], 0)
        for number in range(count):
            turn, batch = number % len(schemes), number % len(tokens)
            for scheme in (*schemes[turn:], *schemes[:turn]):
                found[scheme].add(step(work, worlds[scheme], scheme, paths[scheme.steps], batch), tokens[batch])
            say(f"round {number + 1} of {count}: " + ", ".join(f"{s.name} {m.rates[-1]:.0f}" for s, m in found.items()))
    return found


# One machine, one corpus


def small_model(shrink: float, layers: int, vocab: int) -> ModelSpec:
    """Llama 7B, narrower: as many key/value heads as query heads, feed-forward width 43/16 of the model's."""
    heads = max(4, round(REAL_WIDTH / shrink / HEAD_WIDTH))
    head_width = HEAD_WIDTH if REAL_WIDTH / shrink >= 4 * HEAD_WIDTH else 16
    width = heads * head_width
    return ModelSpec("llama", vocab, width, layers, heads, heads, head_width, width * 43 // 16, REAL_LONGEST)


def on_corpus(
    work: Work, data: str, steps: Sequence[Pairs], rates: Mapping[str, Rates], fixed_s: Mapping[str, float], options
) -> tuple[list[dict], list[dict]]:
    """Rows, and what is best under each budget."""
    made = {"plain": steps, "padded": [padded(pairs, work.ends) for pairs in steps]}
    made |= {"first": [[document(TINY)] * work.machine.ranks]}
    made |= {"first of each": [made["first"][0] + [document(end + 1) for end in work.ends[:-1]]]}
    paths = {name: work.file(f"{data}-{name}", documents) for name, documents in made.items()}
    tokens = [sum(len(ids) for ids, _ in pairs) for pairs in steps]
    last = len(work.ends) - 1
    fitting = options.static or [layout for layout in rates if last in rates[layout]]
    statics = [Scheme(f"static:{layout}", "longshift", ((work.longest, layout),)) for layout in fitting]
    lengths = [len(ids) for ids, _ in steps[0]]
    hots = [Scheme(f"assigned-{n}", "longshift", groups) for n, groups in enumerate(map(parse_groups, options.assign))]
    hots = hots or [s for s in assignments(work, rates, fixed_s, lengths, options.assignments) if len(s.groups) > 1]
    fsdp2 = Scheme("fsdp2:z3", "fsdp2", ((work.longest, "z3"),))
    tried = warm_up(work, [*statics, *hots, fsdp2], paths, tokens)
    family = [s for s in statics if in_papers_family(s.groups[0][1])]

    def best(some: Sequence[Scheme], budget_mib: float, count: int) -> list[Scheme]:
        fit = [s for s in some if tried[s].peak_mib <= budget_mib]
        return sorted(fit, key=lambda s: -statistics.median(tried[s].rates))[:count]

    def bucketed(scheme: Scheme) -> Scheme:
        return replace(scheme, name=scheme.name.replace("static", "static-padded"), padded=True)

    chosen: dict[Scheme, None] = {}
    for budget_mib in work.budgets_mib:
        chosen |= dict.fromkeys(s for some in (hots, family, statics) for s in best(some, budget_mib, options.top))
        chosen |= dict.fromkeys(map(bucketed, best(family, budget_mib, 1)))
    chosen |= dict.fromkeys(best([fsdp2], work.budgets_mib[-1], 1))
    measured = rounds(work, list(chosen), paths, tokens, options.rounds) if chosen else {}
    rows = [row(work, data, s, replace(found, peak_mib=tried.get(s, found).peak_mib), interleaved=True) for s, found in measured.items()]
    rows += [row(work, data, s, found, interleaved=False) for s, found in tried.items() if s not in measured]

    chosen_by = {s: statistics.median(found.rates[::2]) for s, found in measured.items()}

    def compared(budget_mib: float) -> dict:
        told: dict = {"budget_mib": budget_mib if budget_mib < float("inf") else None, "hot": None}
        fit = [s for s in tried if tried[s].peak_mib <= budget_mib]
        if not (own := max((s for s in fit if s in measured and s != fsdp2), key=lambda s: chosen_by[s], default=None)):
            return told
        told |= {"hot": str(own), "tokens_per_s": statistics.median(measured[own].rates), "peak_mib": tried[own].peak_mib}
        kinds = {
            kind: [s for s in some if s in fit] for kind, some in (("static_all", statics), ("static_tp_pp", family), ("fsdp2", [fsdp2]))
        }
        for kind, some in (kinds | {"bucket_padded": [bucketed(s) for s in kinds["static_tp_pp"]]}).items():
            if not (rivals := [s for s in some if s in measured]):
                told[kind] = None
                continue
            other = max(rivals, key=lambda s: chosen_by[s])
            pairs = [mine / theirs for mine, theirs in zip(measured[own].rates[1::2], measured[other].rates[1::2])]
            told[kind] = {"ratio": statistics.median(pairs), "spread": spread(pairs) if len(pairs) > 1 else None, "to": other.name}
            told[kind] |= {"chosen_by_tokens_per_s": [chosen_by[own], chosen_by[other]]}
        return told

    return rows, [compared(budget_mib) for budget_mib in work.budgets_mib]


def row(work: Work, data: str, scheme: Scheme, found: MeasuredStep, interleaved: bool) -> dict:
    model = work.machine.model
    return {
        "data": data,
        "machine": work.machine.kind,
        "ranks": work.machine.ranks,
        "nodes": work.machine.ranks // work.machine.per_node,
        "links_mb_s": [round(rate / 1e6, 1) for rate in (model.intra_bytes_per_s, model.inter_bytes_per_s)] if model else None,
        "scheme": scheme.name,
        "groups": str(scheme),
        "tokens_per_s": statistics.median(found.rates),
        "spread": spread(found.rates) if len(found.rates) > 1 else None,
        "by_step": [round(rate, 1) for rate in found.rates],
        "interleaved": interleaved,
        "peak_mib": found.peak_mib,
        "switch_exposed_share": statistics.median(found.exposed),
        "visited": ", ".join(f"{v['layout']} {v['tokens']} tokens {v['seconds']:.2f} s" for v in found.visited) or None,
    }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--plain", action="append", default=[], metavar="SIZES", help="such as ranks=2; may be repeated")
    parser.add_argument(
        "--scale-model", action="append", default=[], metavar="SIZES", help='"nodes=2,per_node=2,cpu=0.5,like=a800,shrink=8"'
    )
    parser.add_argument("--budgets", nargs="*", default=[], metavar="BYTES", help="memory a rank, such as 700M; without, no limit")
    parser.add_argument("--corpora", nargs="*", default=["python"], choices=["python", "text"], help="text needs --lengths")
    parser.add_argument("--lengths", type=Path, help="a file of document lengths")
    parser.add_argument("--shrink", type=float, default=8.0, help="4096 / the model's width")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="of a step, for each rank")
    parser.add_argument("--rounds", type=int, default=6, help="counted rounds")
    parser.add_argument("--batches", type=int, default=2, help="different steps, in turn")
    parser.add_argument("--assignments", type=int, default=8, help="of layouts to groups that are warmed up, at most")
    parser.add_argument("--groups", type=int, default=4, help="of lengths: each is up to twice as long as the one before")
    parser.add_argument("--top", type=int, default=2, help="schemes of a kind that go into the rounds")
    parser.add_argument("--meshes", nargs="*", default=[], help="try only these, such as u4 or pp2.tp2")
    parser.add_argument("--static", nargs="*", default=[], help="try only these, such as u4.z1, instead of what the probes say")
    parser.add_argument(
        "--assign", action="append", default=[], help='such as "2048: dp4.z1 > 8192: u4.z1"; with --static, nothing is probed'
    )
    parser.add_argument("--policies", nargs="*", default=POLICIES, help="stages of ZeRO and recomputation, the fastest first")
    options = parser.parse_args()
    if "text" in options.corpora and not options.lengths:
        parser.error("--corpora text needs --lengths FILE")
    if options.quick:
        options.shrink, options.tokens, options.rounds, options.assignments = 128, 128, 2, 4
        options.layers, options.groups, options.top, options.batches = 1, 3, 1, 1
        options.meshes = options.meshes or ["dp2", "tp2", "u2"]
    rows, compared = [], {}
    budgets_mib = tuple(sorted(scale_model.binary(text) / 2**20 for text in options.budgets)) or (float("inf"),)
    spec = small_model(options.shrink, options.layers, 512 if options.quick else 2048)
    longest = int(REAL_LONGEST / options.shrink)
    ends = tuple(longest // 2**i for i in reversed(range(options.groups)))
    for description in [*options.plain, *options.scale_model] or [PLAIN]:
        with machine(description) as place, tempfile.TemporaryDirectory(prefix="longshift-") as scratch:
            work = Work(spec, ends, budgets_mib, place, Path(scratch), json.dumps(Trial(spec, (), "bf16").to_json()))
            say(f"{description}: {spec.parameters / 1e6:.1f} M weights, groups up to {', '.join(map(str, ends))} tokens")
            rates, fixed_s = ({}, {}) if options.static and options.assign else probe_all(work, options.meshes, options.policies)
            for data in options.corpora:
                file = options.lengths if data == "text" else None
                with ForkedWorld(1) as reader:
                    how = {"vocab": spec.vocab, "quick": options.quick, "lengths": str(file) if file else None, "shrink": options.shrink}
                    told = {**how, "tokens": options.tokens * place.ranks, "steps": options.batches, "seed": 0}
                    (steps,) = reader.call("hot_ranks:documents", DEADLINE_S, **told)
                found, ratios = on_corpus(work, data, steps, rates, fixed_s, options)
                rows += found
                compared[f"{place.kind} {place.ranks}, {data}"] = ratios
                say(f"{place.kind} {place.ranks}, {data}: {ratios}")
    publish("hot_switch", {"compared": compared}, rows, options.json)


if __name__ == "__main__":
    main()
