"""Does a plan choose as training does? Two plain ranks train under layouts and groups of lengths, interleaved; the same steps on the clock;
and what the planner chooses under four budgets of memory beside the best single layout that fits them.

This machine is profiled (`--quick` takes the preset of CPUs, and one round). Documents have the lengths of `examples/lengths` and of
Python's library, SHRINK times shorter; their tokens are random. Every way to train has processes of its own, which sleep while others are
measured; a round is a step of each, in its own order.

steps     `raw`: the clock's seconds over the measured ones, the median of all rounds; `calibrated`: the same on the cluster as
          `longshift calibrate` would have it after a median step of three ways, one dp, one tp, one pp. `regret_first`: how much longer the
          way that the clock puts first takes than the fastest one.
memory    Peak of the fullest rank beyond what it began with, and the ledger's bytes with what the three calibrating ways had besides.
budgets   The three ways that the planner would try for a budget are trained. Even rounds say which of them is fastest, and which single
          layout of those whose tensors fit it. Odd rounds say the ratios: `auto_over_best_static`, seconds of that single
          layout over those of that way, and `auto_over_context_parallel`, of the best way by context parallelism alone.
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from common import arguments, publish, say
from plan_corpora import split
from worlds import SleepingWorld

from longshift.cluster import files
from longshift.cluster.cluster import Cluster
from longshift.forecast import on_cluster
from longshift.layout.layout import Layout
from longshift.planner.least_bytes import FILLED
from longshift.planner.replay import Replay, Task, in_visiting_order
from longshift.planner.search import search
from longshift.simulate.calibrate import by_steps
from longshift.simulate.clock import Clock
from longshift.spec import families
from longshift.trainer.check import Trial
from longshift.workload.given import Lengths, read_lengths
from longshift.workload.groups import Edge

K = 1 << 10
LONGEST, TOKENS = 2 * K, 8 * K
SINGLE = (
    *("dp2", "dp2.z1", "dp2.z2", "dp2.z3", "tp2", "u2", "ring2", "pp2", "dp2.recompute-full", "tp2.recompute-full", "u2.z3"),
    *("dp2.recompute-attention", "pp2.v2", "u2.recompute-full"),
)
GROUPS = (
    ((256, "dp2", 2 * K), (2 * K, "tp2", 2 * K)),
    ((512, "dp2", 512), (2 * K, "u2", 2 * K)),
    ((256, "u2", 256), (2 * K, "pp2", 2 * K)),
    ((128, "dp2", 512), (512, "u2", 512), (2 * K, "tp2", 2 * K)),
)
CALIBRATING = ("dp2", "tp2", "pp2")
CORPORA = ("python", "wikipedia", "pretraining")
LENGTHS = Path(__file__).parents[1] / "examples" / "lengths"
SHRINK, STEP, CHARACTERS = 16, 32, 3.5  # lengths are multiples of STEP tokens: CPU matmuls keep code for every shape
SHARES = (1.1, 0.8, 0.7, 0.6)  # of what dp2's tensors need: budgets
HOLES = 1.05  # of resident memory: what the C library's heap keeps between tensors
QUIET = 0.3  # spread of a way's rounds, which have different documents: some 0.15 by themselves
DEADLINE_S = 240.0


@dataclass
class Way:
    """Length groups that are trained: seconds of each round, measured and on the clock; bytes of the fullest rank, and the ledger's.
    Mutable."""

    edges: tuple[Edge, ...]
    world: SleepingWorld
    measured: list[float] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)
    peak_bytes: float = 0.0
    ledger_bytes: int = 0

    def __str__(self) -> str:
        told = (f"{edge.use} <= {edge.upto}" + (f" in {edge.pack}" if edge.pack != edge.upto else "") for edge in self.edges)
        return str(self.edges[0].use) if len(self.edges) == 1 and self.edges[0].pack == LONGEST else " > ".join(told)


class Corpus:
    """A corpus, and what is trained on it. Mutable."""

    def __init__(self, name: str, folder: Path, cluster: Cluster, rounds: int, worlds: ExitStack):
        self.name, self.rounds, self.worlds = name, rounds, worlds
        lengths = split(Lengths.from_array(rounded(own_lengths(name))), LONGEST)
        self.task = Task(families.preset("tiny-llama"), cluster, lengths, TOKENS, "float32", 2)
        self.steps = [lengths.draw(1000 + number, TOKENS).tolist() for number in range(rounds + 1)]
        generator = np.random.default_rng(0)
        given = [[document(generator, length, self.task.spec.vocab) for length in step] for step in self.steps]
        self.path = folder / f"{name}.json"
        self.path.write_text(json.dumps(given))
        self.trial = json.dumps(Trial(self.task.spec, (), precision="float32", lr=1e-4).to_json())
        self.replay = Replay(self.task)
        self.ways: dict[tuple[Edge, ...], Way] = {}

    def add(self, edges: tuple[Edge, ...]) -> Way:
        """A way to train, measured with those that are there in the next rounds."""
        if edges not in self.ways:
            way = self.ways[edges] = Way(edges, self.worlds.enter_context(SleepingWorld(2)))
            way.ledger_bytes = self.replay.weigh(edges)[0]["device"]
            way.clock = self.clocked(edges, self.replay)
        return self.ways[edges]

    def clocked(self, edges: tuple[Edge, ...], replay: Replay) -> list[float]:
        """The clock's seconds of all rounds."""
        shape = replay.shape(edges)
        clock = Clock(shape, replay.task.cluster, replay.cost, "float32")
        return [clock.step(in_visiting_order(shape, lengths)).seconds for lengths in self.steps[1:]]

    def calibrated(self) -> Replay:
        """What plays on the cluster that a median step of each calibrating way shows."""
        ways = [self.single(text) for text in CALIBRATING]

        def moved(constants: Mapping[str, float]) -> Replay:
            return Replay(replace(self.task, cluster=self.task.cluster.moved(constants)))

        def play(constants: Mapping[str, float]) -> np.ndarray:
            replay = moved(constants)
            return np.array([statistics.median(self.clocked(way.edges, replay)) for way in ways])

        return moved(by_steps(play, np.array([statistics.median(way.measured) for way in ways])).constants)

    def train(self) -> None:
        """A first step of every way, which is not counted, and all rounds, interleaved."""
        ways = list(self.ways.values())
        for number in range(self.rounds + 1):
            for way in random.Random(number).sample(ways, len(ways)):
                seconds = self.step(way, number)
                if number:
                    way.measured.append(seconds)
            say(f"{self.name}, step {number}: {len(ways)} ways")

    def step(self, way: Way, number: int) -> float:
        edges = [(edge.upto, str(edge.use), edge.pack) for edge in way.edges]
        told = {"edges": edges, "trial": self.trial, "path": str(self.path), "number": number}
        found = way.world.call("plan_ranks:update", DEADLINE_S, **told)
        way.peak_bytes = max(way.peak_bytes, *(rank["peak_bytes"] for rank in found))
        return max(rank["seconds"] for rank in found)

    def single(self, text: str) -> Way:
        return self.ways[Edge(LONGEST, Layout.parse(text), LONGEST),]

    @property
    def besides_bytes(self) -> float:
        """What ranks have besides their tensors, as the calibrating ways show."""
        return max(self.single(text).peak_bytes - self.single(text).ledger_bytes for text in CALIBRATING)

    def forecast_bytes(self, ledger_bytes: float) -> float:
        return HOLES * (ledger_bytes + self.besides_bytes)

    def rows(self) -> list[dict]:
        over = {edges: statistics.median(np.divide(way.clock, way.measured)) for edges, way in self.ways.items()}
        replay = self.calibrated()
        known = {edges: statistics.median(np.divide(self.clocked(edges, replay), way.measured)) for edges, way in self.ways.items()}
        return [
            {
                "corpus": self.name,
                "way": str(way),
                "measured_s": statistics.median(way.measured),
                "spread": (max(way.measured) - min(way.measured)) / statistics.median(way.measured),
                "predicted_s": statistics.median(way.clock),
                "raw": over[edges] - 1,
                "calibrated": known[edges] - 1,
                "calibrates": str(way) in CALIBRATING,
                "peak_bytes": way.peak_bytes,
                "forecast": self.forecast_bytes(way.ledger_bytes) / way.peak_bytes - 1,
            }
            for edges, way in self.ways.items()
        ]

    def chosen(self, share: float) -> tuple[int, list[tuple[Edge, ...]], tuple[Edge, ...] | None]:
        """Bytes of tensors for a share of what dp2 needs; the planner's first three ways for them, and its best by context parallelism."""
        tensors = int(share * self.single("dp2").ledger_bytes)
        found = search(replace(self.task, memory_bytes=tensors / FILLED))
        alike = found.context_parallel
        return tensors, [way.edges for way in found.worth_trying(3)], alike.edges if alike else None

    def judged(self, share: float, tensors: int, tried: Sequence[tuple[Edge, ...]], alike: tuple[Edge, ...] | None) -> dict:
        limit = self.forecast_bytes(tensors)
        singles = [way for text in SINGLE if (way := self.ways.get((Edge(LONGEST, Layout.parse(text), LONGEST),)))]
        within = [way for way in singles if way.ledger_bytes <= tensors]
        auto = min((self.ways[edges] for edges in tried), key=even_s)
        best = min(within, key=even_s, default=None)
        return {
            "corpus": self.name,
            "share": share,
            "tensors_bytes": tensors,
            "tried": [str(self.ways[edges]) for edges in tried],
            "auto": str(auto),
            "best_static": str(best) if best else None,
            "auto_over_best_static": over(best, auto) if best else None,
            "auto_over_context_parallel": over(self.ways[alike], auto) if alike else None,
            "first_over_auto": over(self.ways[tried[0]], auto),
            "most_of_limit": max(self.ways[edges].peak_bytes for edges in tried) / limit,
        }


def even_s(way: Way) -> float:
    return statistics.median(way.measured[::2])


def over(one: Way, other: Way) -> float:
    """Seconds of one way over those of another, in odd rounds; of one round, in that."""
    odd = slice(1, None, 2) if len(one.measured) > 1 else slice(None)
    return 1.0 if one is other else float(statistics.median(np.divide(one.measured[odd], other.measured[odd])))


def own_lengths(name: str) -> np.ndarray:
    """Lengths of a corpus in tokens, SHRINK times shorter."""
    if name == "python":
        library = sorted(Path(json.__file__).parents[1].glob("*.py"))
        return np.array([path.stat().st_size for path in library]) / CHARACTERS / SHRINK
    found = read_lengths(LENGTHS / f"{name}.csv")
    return np.random.default_rng(0).choice(found.lengths, 20_000, p=found.counts / found.counts.sum()) / SHRINK


def rounded(lengths: np.ndarray) -> np.ndarray:
    return np.maximum(STEP, np.rint(lengths / STEP) * STEP).astype(np.int64)


def document(generator: np.random.Generator, length: int, vocab: int) -> tuple[list[int], list[int]]:
    ids = generator.integers(0, vocab, length).tolist()
    return ids, [*ids[1:], -100]


def profiled(file: Path) -> Cluster:
    """This machine, measured now."""
    command = [sys.executable, "-m", "longshift.cli", "profile", "--quick", "--fresh", "-o", str(file)]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return files.load(file)


def summary(corpora: Mapping[str, Corpus], rows: Sequence[dict], budgets: Sequence[dict]) -> dict:
    judged = [row for row in rows if not row["calibrates"]]

    def most(pick: Callable, name: str) -> float | None:
        return pick((one[name] for one in budgets if one[name]), default=None)

    regrets = {}
    for name, corpus in corpora.items():
        known = [corpus.ways[edges] for edges in list(corpus.ways)[: len(SINGLE) + len(GROUPS)]]
        first, best = min(known, key=lambda way: statistics.median(way.clock)), min(known, key=even_s)
        regrets[name] = over(first, best) - 1
    return {
        "median_raw": statistics.median(abs(row["raw"]) for row in rows),
        "median_calibrated": statistics.median(abs(row["calibrated"]) for row in judged),
        "worst_calibrated": max(abs(row["calibrated"]) for row in judged),
        "median_spread": statistics.median(row["spread"] for row in rows),
        "regret_first": max(regrets.values()),
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
    args = arguments(__doc__ or "").parse_args()
    names, rounds = (CORPORA[1:2], 1) if args.quick else (CORPORA, 12)
    singles, groups = (CALIBRATING, GROUPS[:1]) if args.quick else (SINGLE, GROUPS)
    ways = [(Edge(LONGEST, Layout.parse(text), LONGEST),) for text in singles]
    ways += [tuple(Edge(upto, Layout.parse(layout), pack) for upto, layout, pack in group) for group in groups]
    rows, budgets, corpora = [], [], {}
    with tempfile.TemporaryDirectory() as scratch:
        cluster = on_cluster(files.preset("cpu") if args.quick else profiled(Path(scratch, "profile.json")), 2)
        for name in names:
            with ExitStack() as worlds:
                corpus = corpora[name] = Corpus(name, Path(scratch), cluster, rounds, worlds)
                for edges in ways:
                    corpus.add(edges)
                choices = [(share, *corpus.chosen(share)) for share in (SHARES[:1] if args.quick else SHARES)]
                for _, _, tried, alike in choices:
                    for edges in [*tried, *([alike] if alike else [])]:
                        corpus.add(edges)
                corpus.train()
                budgets += [corpus.judged(*choice) for choice in choices]
                rows += corpus.rows()
    found = summary(corpora, rows, budgets)
    if found["median_spread"] > QUIET:
        say(f"rounds differ by {found['median_spread']:.0%}: this machine was not quiet, and these seconds say nothing")
    publish("plan_choice", found, rows, args.json)


if __name__ == "__main__":
    main()
