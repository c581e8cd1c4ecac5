"""Does a plan choose as training does? Ranks train under layouts and groups of lengths, interleaved; the same steps on the clock; and what
the planner chooses under budgets of memory beside the best single layout that fits them.

`--case plain` has two ranks on this machine as it is, `2x2` and `2x4` four and eight on its scale model of two nodes (`scale_model`; as
root). The machine, or the model, is profiled (`--quick` takes the preset of CPUs, and a `brief` case). Documents have the lengths of
`examples/lengths` and of Python's library, so many times shorter as the case says; their tokens are random. Every way to train has
processes of its own, which sleep while others are measured; a round is a step of each, in its own order. Steps are typical of the corpus
(`Lengths.typical`), and each is trained in two rounds, an even and an odd one.

steps     `raw`: the clock's seconds over the measured ones, the median of all rounds; `calibrated`: the same on the cluster as
          `longshift calibrate` would have it after a median step of three ways, one dp, one tp, one pp. `regret_first`: how much longer the
          way that the clock puts first, by all its rounds, takes than the fastest one; `regret_tried`: the same of the way that goes on
          when as many are tried as in a run, the first by the clock.
memory    Peak of the fullest rank beyond what it began with in two first steps, in which freed memory goes back at once, so that holes in
          the C library's heap decide nothing; packs of the second are as large as packs get (`fullest`). And the ledger's bytes with what
          the three calibrating ways had besides.
budgets   The ways that the planner would try for a budget, its best single layout and its best by context parallelism alone are
          trained. Even rounds say which of them goes on, as in a run (`trainer.plan_file`), and which single layout was the fastest
          of all that are trained and whose tensors fit. Odd rounds say the ratios: `auto_over_best_static`, seconds of that single layout
          over those of that way, and `auto_over_context_parallel`; and the most that `auto_over_best_static` could be, `at_most`: seconds
          of that single layout over those of the fastest way of all, whatever memory it takes. `--judge REPORT` judges the rounds of an
          earlier report anew.
"""

import json
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from common import arguments, commit, publish, say
from machine_profile import measure, on_model
from plan_corpora import split
from trial import Trial
from worlds import Machine, machine

from longshift.cluster import files
from longshift.cluster.cluster import Cluster
from longshift.dist.fork import ForkedWorld
from longshift.layout.layout import Layout
from longshift.planner.plan_evaluator import PlanEvaluator
from longshift.planner.search import MAX_TRIALS, search
from longshift.planner.task import FILLED, PlanTask
from longshift.simulate.calibrate import by_steps
from longshift.simulate.clock import Clock, in_visiting_order
from longshift.spec import families
from longshift.spec.formats import PrecisionName
from longshift.spec.model import ModelSpec
from longshift.step_report import on_cluster
from longshift.trainer.plan_file import TrialResult, fastest_trial
from longshift.workload.groups import Edge
from longshift.workload.length_file import Lengths, read_lengths

K = 1 << 10


@dataclass(frozen=True)
class Case:
    """Where ranks run, as `worlds.machine` takes it, and what they train. Documents are `shrink` times shorter than those of a corpus,
    `longest` tokens at the most; `tokens` of a step. `single`: layouts that train alone; `groups`: assignments, as (upto, layout, pack);
    `calibrating`: three of the former, one by replicas, one by tensors, one by stages; `shares`: of what the first one's tensors need:
    budgets; `rounds`: that count; `tried`: ways that are tried for a budget, at most."""

    on: str
    spec: ModelSpec
    precision: PrecisionName
    shrink: int
    longest: int
    tokens: int
    single: tuple[str, ...]
    groups: tuple[tuple[tuple[int, str, int], ...], ...]
    calibrating: tuple[str, str, str]
    shares: tuple[float, ...]
    rounds: int
    tried: int = MAX_TRIALS

    def alone(self, layout: str) -> tuple[Edge, ...]:
        """One layout for all documents, in packs of the longest."""
        return (Edge(self.longest, Layout.parse(layout), self.longest),)

    @property
    def ways(self) -> list[tuple[Edge, ...]]:
        """All that is trained in any case."""
        groups = [tuple(Edge(upto, Layout.parse(layout), pack) for upto, layout, pack in group) for group in self.groups]
        return [*map(self.alone, self.single), *groups]


# Llama 2 7B, 16 times narrower, with two blocks, eight heads and a small vocabulary.
NARROW = ModelSpec("llama", 2048, 256, 2, 8, 8, 32, 688, 32 * K)
PLAIN = Case(
    on="ranks=2",
    spec=families.preset("tiny-llama"),
    precision="float32",
    shrink=16,
    longest=2 * K,
    tokens=8 * K,
    single=(
        *("dp2", "dp2.z1", "dp2.z2", "dp2.z3", "tp2", "u2", "ring2", "pp2", "dp2.recompute-full", "tp2.recompute-full", "u2.z3"),
        *("pp2.v2", "u2.recompute-full"),
    ),
    groups=(
        ((256, "dp2", 2 * K), (2 * K, "tp2", 2 * K)),
        ((512, "dp2", 512), (2 * K, "u2", 2 * K)),
        ((256, "u2", 256), (2 * K, "pp2", 2 * K)),
        ((128, "dp2", 512), (512, "u2", 512), (2 * K, "tp2", 2 * K)),
    ),
    calibrating=("dp2", "tp2", "pp2"),
    shares=(1.1, 0.8, 0.7, 0.6),
    rounds=12,
)
# Documents of up to 4K tokens, as 64K of a model 16 times wider: whole packs of them take most of the memory that a budget has.
NODES_OF_2 = Case(
    on="nodes=2,per_node=2,cpu=0.4,intra=600M,inter=75M",
    spec=NARROW,
    precision="float32",
    shrink=16,
    longest=4 * K,
    tokens=12 * K,
    single=(
        *("dp4.z1", "dp4.z3", "tp4", "u4.z1", "ring4.z1", "pp2.dp2.z1", "dp2.tp2.z1", "dp2.u2.z1", "u2.tp2"),
        *("u4.recompute-full.z1", "ring4.recompute-full.z1", "u2.tp2.recompute-full.z1"),
    ),
    groups=(
        ((512, "dp4.z1", 512), (4 * K, "u4.z1", 4 * K)),
        ((512, "dp4.z1", 512), (K, "dp2.u2.z1", K), (4 * K, "u4.z1", 4 * K)),
        ((2 * K, "dp2.tp2.z1", 2 * K), (4 * K, "tp4", 4 * K)),
        ((512, "dp4.z1", 2 * K), (4 * K, "dp2.u2.z1", 4 * K)),
    ),
    calibrating=("dp4.z1", "tp4", "pp2.dp2.z1"),
    shares=(1.0, 0.6, 0.38, 0.3),
    rounds=10,
)
NODES_OF_4 = replace(
    NODES_OF_2,
    on="nodes=2,per_node=4,cpu=0.2,intra=300M,inter=37.5M",
    tokens=16 * K,
    single=(
        *("dp8.z1", "dp8.z3", "u8.z1", "ring8.z1", "pp2.dp4.z1", "dp2.tp4.z1", "dp2.u4.z1", "dp4.tp2.z1", "dp4.u2.z1", "u4.tp2"),
        *("u8.recompute-full.z1", "u4.tp2.recompute-full.z1"),
    ),
    groups=(
        ((512, "dp8.z1", 512), (4 * K, "u8.z1", 4 * K)),
        ((512, "dp8.z1", 512), (K, "dp4.u2.z1", K), (4 * K, "u8.z1", 4 * K)),
        ((2 * K, "dp4.tp2.z1", 2 * K), (4 * K, "dp2.tp4.z1", 4 * K)),
        ((512, "dp8.z1", 2 * K), (4 * K, "dp2.u4.z1", 4 * K)),
    ),
    calibrating=("dp8.z1", "dp2.tp4.z1", "pp2.dp4.z1"),
    shares=(0.6, 0.3, 0.2),
    rounds=6,
)
CASES = {"plain": PLAIN, "2x2": NODES_OF_2, "2x4": NODES_OF_4}
CORPORA = ("python", "wikipedia", "pretraining")
LENGTHS = Path(__file__).parents[1] / "examples" / "lengths"
STEP, CHARACTERS = 32, 3.5  # lengths are multiples of STEP tokens: CPU matmuls keep code for every shape
MARGIN = 1.05  # of resident memory: what ways differ by besides their tensors
QUIET = 0.3  # spread of a way's rounds, which have different documents: some 0.15 by themselves
WARM = 2  # first steps
NO_HOLES = 1 << 16  # bytes that go back at once when they are freed, while memory is measured
KEPT = 32 << 20  # the same while seconds are, and the most that glibc takes; at 4 MiB large packs pay for page faults
DEADLINE_S = 240.0


@dataclass
class Way:
    """Length groups that are trained: seconds of each round, measured and on the clock; bytes of the fullest rank, and the ledger's.
    `fullest`: a file with a step of the largest packs. Mutable."""

    edges: tuple[Edge, ...]
    world: ForkedWorld
    fullest: Path
    measured: list[float] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)
    peak_bytes: float = 0.0
    ledger_bytes: int = 0

    def __str__(self) -> str:
        told = (f"{edge.use} <= {edge.upto}" + (f" in {edge.pack}" if edge.pack != edge.upto else "") for edge in self.edges)
        return str(self.edges[0].use) if len(self.edges) == 1 and self.edges[0].pack == self.edges[0].upto else " > ".join(told)


class Corpus:
    """A corpus, and what is trained on it. Mutable."""

    def __init__(self, name: str, folder: Path, case: Case, machine: Machine, cluster: Cluster, worlds: ExitStack):
        self.name, self.case, self.machine, self.worlds = name, case, machine, worlds
        lengths = split(Lengths.from_array(rounded(own_lengths(name) / case.shrink)), case.longest)
        self.task = PlanTask(case.spec, cluster, lengths, case.tokens, case.precision, machine.ranks)
        typical = lengths.typical(-(-case.rounds // 2), case.tokens)
        self.steps = [typical[max(0, number - WARM) // 2].tolist() for number in range(WARM + case.rounds)]
        generator = np.random.default_rng(0)
        given = [[document(generator, length, case.spec.vocab) for length in step] for step in self.steps]
        self.path = folder / f"{name}.json"
        self.path.write_text(json.dumps(given))
        self.trial = json.dumps(Trial(case.spec, (), precision=case.precision, lr=1e-4).to_json())
        self.evaluator = PlanEvaluator(self.task)
        self.ways: dict[tuple[Edge, ...], Way] = {}
        self.folder, self.generator = folder, generator

    def add(self, edges: tuple[Edge, ...]) -> Way:
        """A way to train, measured with those that are there in the next rounds."""
        if edges not in self.ways:
            path = self.folder / f"{self.name}-{len(self.ways)}.json"
            path.write_text(
                json.dumps([[document(self.generator, length, self.case.spec.vocab) for length in fullest(edges, self.case.tokens)]])
            )
            way = self.ways[edges] = Way(edges, self.worlds.enter_context(self.machine.world()), path)
            way.ledger_bytes = self.evaluator.weigh(edges)[0]["device"]
            way.clock = self.clocked(edges, self.evaluator)
        return self.ways[edges]

    def clocked(self, edges: tuple[Edge, ...], evaluator: PlanEvaluator) -> list[float]:
        """The clock's seconds of all rounds."""
        shape = evaluator.shape(edges)
        clock = Clock(shape, evaluator.task.cluster, evaluator.cost)
        return [clock.step(in_visiting_order(shape, lengths)).seconds for lengths in self.steps[WARM:]]

    def calibrated(self) -> PlanEvaluator:
        """What plays on the cluster that a median step of each calibrating way shows."""
        ways = [self.single(text) for text in self.case.calibrating]

        def moved(constants: Mapping[str, float]) -> PlanEvaluator:
            return PlanEvaluator(replace(self.task, cluster=self.task.cluster.moved(constants)))

        def play(constants: Mapping[str, float]) -> np.ndarray:
            evaluator = moved(constants)
            return np.array([statistics.median(self.clocked(way.edges, evaluator)) for way in ways])

        return moved(by_steps(play, np.array([statistics.median(way.measured) for way in ways])).constants)

    def train(self) -> None:
        """First steps of every way, which say what memory it takes, and all rounds, interleaved."""
        ways = list(self.ways.values())
        for number in range(WARM + self.case.rounds):
            for way in random.Random(number).sample(ways, len(ways)):
                seconds, peak_bytes = self.step(way, number)
                if number < WARM:
                    way.peak_bytes = max(way.peak_bytes, peak_bytes)
                else:
                    way.measured.append(seconds)
            say(f"{self.name}, step {number}: {len(ways)} ways")

    def step(self, way: Way, number: int) -> tuple[float, float]:
        """Seconds of the slowest rank, and the fullest one's peak."""
        edges = [(edge.upto, str(edge.use), edge.pack) for edge in way.edges]
        path, number_there = (way.fullest, 0) if number == WARM - 1 else (self.path, number)
        told = {"edges": edges, "trial": self.trial, "path": str(path), "number": number_there, "per_node": self.machine.per_node}
        found = way.world.call("plan_ranks:update", DEADLINE_S, **told, give_back=NO_HOLES if number < WARM else KEPT)
        return max(rank["seconds"] for rank in found), max(rank["peak_bytes"] for rank in found)

    def single(self, text: str) -> Way:
        return self.ways[self.case.alone(text)]

    @property
    def besides_bytes(self) -> float:
        """What ranks have besides their tensors, as the calibrating ways show."""
        return max(self.single(text).peak_bytes - self.single(text).ledger_bytes for text in self.case.calibrating)

    def forecast_bytes(self, ledger_bytes: float) -> float:
        return MARGIN * (ledger_bytes + self.besides_bytes)

    def rows(self) -> list[dict]:
        over = {edges: statistics.median(np.divide(way.clock, way.measured)) for edges, way in self.ways.items()}
        evaluator = self.calibrated()
        known = {edges: statistics.median(np.divide(self.clocked(edges, evaluator), way.measured)) for edges, way in self.ways.items()}
        return [
            {
                "corpus": self.name,
                "way": str(way),
                "measured_s": statistics.median(way.measured),
                "rounds_s": [round(seconds, 4) for seconds in way.measured],
                "spread": (max(way.measured) - min(way.measured)) / statistics.median(way.measured),
                "predicted_s": statistics.median(way.clock),
                "clock_s": [round(seconds, 4) for seconds in way.clock],
                "raw": over[edges] - 1,
                "calibrated": known[edges] - 1,
                "calibrates": str(way) in self.case.calibrating,
                "peak_bytes": way.peak_bytes,
                "forecast": self.forecast_bytes(way.ledger_bytes) / way.peak_bytes - 1,
            }
            for edges, way in self.ways.items()
        ]

    def chosen(self, share: float) -> "Chosen":
        """What the planner finds for a share of the tensors that the first layout needs; it is trained."""
        tensors = int(share * self.single(self.case.single[0]).ledger_bytes)
        found = search(replace(self.task, memory_bytes=tensors / FILLED))
        alike, single = found.context_parallel, found.single
        tried = [self.add(way.edges) for way in found.trial_plans()[: self.case.tried]]
        if single is not None:
            self.add(single.edges)
        return Chosen(share, tensors, tried, None if alike is None else self.add(alike.edges))

    def budget(self, chosen: "Chosen") -> dict:
        """A budget: what is tried for it, and what that is compared with."""
        within = [way for edges, way in self.ways.items() if len(edges) == 1 and way.ledger_bytes <= chosen.tensors_bytes]
        best = min(within, key=lambda way: sum(way.measured[::2]), default=None)
        alike = chosen.context_parallel
        return {
            "corpus": self.name,
            "share": chosen.share,
            "tensors_bytes": chosen.tensors_bytes,
            "tried": list(map(str, chosen.tried)),
            "best_static": None if best is None else str(best),
            "context_parallel": None if alike is None else str(alike),
            "most_of_limit": max(way.peak_bytes for way in chosen.tried) / self.forecast_bytes(chosen.tensors_bytes),
        }


@dataclass(frozen=True)
class Chosen:
    """What the planner chose for a budget: the ways that are tried, first its first, and its best by context parallelism alone."""

    share: float
    tensors_bytes: int
    tried: Sequence[Way]
    context_parallel: Way | None


def judged(budget: Mapping, rows: Sequence[dict]) -> dict:
    """A budget with which of its ways goes on, and what that gains."""
    ways = {row["way"]: row for row in rows if row["corpus"] == budget["corpus"]}
    auto = budget["tried"][fastest_trial([as_tried(ways[name]) for name in budget["tried"]])]

    def over(name: str | None, other: str) -> float | None:
        return None if name is None else odd_s(ways[name]) / odd_s(ways[other])

    return {
        **budget,
        "auto": auto,
        "auto_over_best_static": over(budget["best_static"], auto),
        "at_most": over(budget["best_static"], min(ways, key=lambda name: even_s(ways[name]))),
        "auto_over_context_parallel": over(budget["context_parallel"], auto),
        "first_over_auto": over(budget["tried"][0], auto),
    }


def as_tried(row: Mapping) -> TrialResult:
    """A way as its even rounds show it."""
    return TrialResult(sum(row["clock_s"][::2]), tuple(row["rounds_s"][::2]), tuple(row["clock_s"][::2]))


def even_s(row: Mapping) -> float:
    """Seconds of a way's even rounds."""
    return sum(row["rounds_s"][::2])


def odd_s(row: Mapping) -> float:
    """Seconds of a way's odd rounds; of the only one, where there is one."""
    return sum(row["rounds_s"][1::2]) or even_s(row)


def fullest(edges: Sequence[Edge], tokens: int) -> list[int]:
    """Lengths of documents that fill the packs of every group: as many packs as `tokens` make on its replicas, and as a pipeline has under
    way; in each as many of the longest as it holds, or one more that fill it exactly."""
    found, longer_than = list[int](), 0
    for edge in edges:
        count, use = edge.pack // edge.upto, edge.use
        shorter = edge.pack // (count + 1) // STEP * STEP
        of_pack = [shorter] * (count + 1) if edge.pack % edge.upto and shorter > longer_than else [edge.upto] * count
        micros = -(-tokens // (edge.pack * use.dp))
        found += of_pack * (use.dp * min(micros, 2 * use.pp * use.virtual + 1))
        longer_than = edge.upto
    return found


def brief(case: Case) -> Case:
    """As little as has every part: documents and steps an eighth as long, a model of two blocks, one
    assignment, one budget, one round."""
    spec = replace(case.spec, layers=2, vocab=1024)
    group = tuple((upto // 8, layout, pack // 8) for upto, layout, pack in case.groups[0])
    sizes = {"shrink": 8 * case.shrink, "longest": case.longest // 8, "tokens": case.tokens // 8}
    counts = {"shares": case.shares[:1], "rounds": 1, "tried": 2}
    return replace(case, spec=spec, single=case.calibrating, groups=(group,), **sizes, **counts)


def own_lengths(name: str) -> np.ndarray:
    """Lengths of a corpus in tokens."""
    if name == "python":
        library = sorted(Path(json.__file__).parents[1].glob("*.py"))
        return np.array([path.stat().st_size for path in library]) / CHARACTERS
    found = read_lengths(LENGTHS / f"{name}.csv")
    return np.random.default_rng(0).choice(found.lengths, 20_000, p=found.counts / found.counts.sum())


def rounded(lengths: np.ndarray) -> np.ndarray:
    return np.maximum(STEP, np.rint(lengths / STEP) * STEP).astype(np.int64)


def document(generator: np.random.Generator, length: int, vocab: int) -> tuple[list[int], list[int]]:
    ids = generator.integers(0, vocab, length).tolist()
    return ids, [*ids[1:], -100]


def profiled(folder: Path, machine: Machine) -> Cluster:
    """This machine, or its scale model, measured now."""
    return on_model(machine.model, folder) if machine.model else measure(folder, quick=True)[0]


def summary(case: Case, rows: Sequence[dict], budgets: Sequence[dict]) -> dict:
    """What rows and judged budgets say."""
    held_back = [row for row in rows if not row["calibrates"]]
    corpora = list(dict.fromkeys(row["corpus"] for row in rows))

    def most(pick: Callable, name: str) -> float | None:
        return pick((one[name] for one in budgets if one[name]), default=None)

    regrets = []
    for name in corpora:
        known = [row for row in rows if row["corpus"] == name][: len(case.single) + len(case.groups)]
        few = sorted(known, key=lambda row: sum(row["clock_s"]))[:MAX_TRIALS]
        regrets.append([odd_s(row) / odd_s(min(known, key=even_s)) - 1 for row in (few[0], few[fastest_trial(list(map(as_tried, few)))])])
    return {
        "median_raw": statistics.median(abs(row["raw"]) for row in rows),
        "median_calibrated": statistics.median(abs(row["calibrated"]) for row in held_back),
        "worst_calibrated": max(abs(row["calibrated"]) for row in held_back),
        "median_spread": statistics.median(row["spread"] for row in rows),
        "regret_first": max(first for first, _ in regrets),
        "regret_tried": max(tried for _, tried in regrets),
        "memory_least": min(row["forecast"] for row in rows),
        "memory_most": max(row["forecast"] for row in rows),
        "auto_over_best_static": most(min, "auto_over_best_static"),
        "auto_over_best_static_by_corpus": {
            name: max(
                (one["auto_over_best_static"] for one in budgets if one["corpus"] == name and one["auto_over_best_static"]), default=None
            )
            for name in corpora
        },
        "auto_over_context_parallel": most(min, "auto_over_context_parallel"),
        "most_of_limit": most(max, "most_of_limit"),
        "budgets": list(budgets),
    }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--case", choices=CASES, default="plain")
    parser.add_argument("--corpora", nargs="*", choices=CORPORA, default=CORPORA)
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="the profile is written there, to plan and play steps with later")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="rows and budgets are written there whenever a corpus ends")
    parser.add_argument("--judge", type=Path, metavar="REPORT", help="train nothing: judge the rounds of this report")
    args = parser.parse_args()
    case, names = CASES[args.case], args.corpora
    if args.judge:
        print(json.dumps(judged_anew(json.loads(args.judge.read_text()), case)))
        return
    if args.quick:
        case, names = brief(case), CORPORA[1:2]
    rows, budgets = [], []
    with machine(case.on) as place, tempfile.TemporaryDirectory() as scratch:
        cluster = on_cluster(files.preset("cpu") if args.quick else profiled(Path(scratch), place), place.ranks)
        if args.cluster:
            files.save(cluster, args.cluster)
        for name in names:
            with ExitStack() as worlds:
                corpus = Corpus(name, Path(scratch), case, place, cluster, worlds)
                for edges in case.ways:
                    corpus.add(edges)
                choices = [corpus.chosen(share) for share in case.shares]
                corpus.train()
                rows += corpus.rows()
                budgets += [judged(corpus.budget(chosen), rows) for chosen in choices]
            if args.rows:
                args.rows.write_text(json.dumps({"rows": rows, "budgets": budgets}))
    found = summary(case, rows, budgets)
    if found["median_spread"] > QUIET:
        say(f"rounds differ by {found['median_spread']:.0%}: this machine was not quiet, and these seconds say nothing")
    publish("plan_choice" + ("" if args.case == "plain" else f"_{args.case}"), found, rows, args.json)


def judged_anew(report: Mapping, case: Case) -> dict:
    """A report whose budgets are judged by the rule of now, with the commit of that rule."""
    rows = report["rows"]
    budgets = [judged(budget, rows) for budget in report["summary"]["budgets"]]
    return {**report, "judged_at": commit(), "summary": summary(case, rows, budgets)}


if __name__ == "__main__":
    main()
