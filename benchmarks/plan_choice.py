"""Does a plan choose as a run does? Two plain ranks train under layouts and groups of lengths; the same steps on the clock; and what the
planner chooses under three budgets of memory beside the best single layout that fits them.

This machine is profiled. Three corpora have the lengths of `examples/lengths` and of Python's library, SHRINK times shorter, as pieces of
source text. Of each, every layout is a run of its own by `longshift train`, in an order drawn anew each round.

steps     A row compares the median seconds of a run's steps with the clock's for the same documents: as they are (`raw`), and times one
          factor that three runs give, one dp, one tp, one pp (`calibrated`). `regret_first`: how much longer the layout that the clock puts
          first takes than the fastest one.
memory    The peak of a run's fullest rank, and the ledger's with what the processes of the three calibrating runs have besides.
budgets   The planner's first three ways for a budget are trained, as `layout: auto` does in its trials. `auto_over_best_static`: seconds of
          the fastest measured single layout whose peak was within the budget, over those of the fastest of the three;
          `auto_over_context_parallel`: of the best way by context parallelism alone.
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from common import arguments, publish, say

from longshift.cluster import files
from longshift.cluster.cluster import Cluster
from longshift.config import Config, parse_config
from longshift.data.batch import Batches
from longshift.explain import shape_of
from longshift.forecast import Planned, RunForecast, cut, on_cluster
from longshift.planner.replay import Task, Way
from longshift.planner.search import search
from longshift.program.needs import most, needs
from longshift.train.corpus import open_corpus
from longshift.workload.given import Lengths, read_lengths

SINGLE = (
    *("dp2", "dp2.z1", "dp2.z2", "dp2.z3", "tp2", "u2", "ring2", "pp2", "dp2.recompute-full", "tp2.recompute-full", "u2.z3"),
    *("dp2.recompute-attention", "pp2.v2", "dp2.chunk1K.disk"),
)
GROUPS = (
    *("[{upto: 512, use: dp2, pack: 4K}, {upto: 4K, use: tp2}]", "[{upto: 1K, use: dp2}, {upto: 4K, use: u2}]"),
    *("[{upto: 512, use: u2}, {upto: 4K, use: pp2}]", "[{upto: 256, use: dp2, pack: 1K}, {upto: 1K, use: u2}, {upto: 4K, use: tp2}]"),
)
CALIBRATING = ("dp2", "tp2", "pp2")
CORPORA = ("python", "wikipedia", "pretraining")
LENGTHS = Path(__file__).parents[1] / "examples" / "lengths"
SHRINK = 8
DOCUMENTS = 4000
CHARACTERS = 3.5  # of a token of source text
SHARES = (1.1, 0.8, 0.6)  # of what dp2's tensors need: budgets
HOLES = 1.03  # of resident memory: what the C library's heap keeps between tensors
CONFIG = """
model: {{preset: tiny-llama}}
data: {{train: [{{path: {folder}/corpus.jsonl, text: text}}], max_len: 4K, overlong: split, cache: {folder}/cache}}
train: {{tokens_per_step: 16K, steps: {steps}, lr: 3e-4, precision: float32}}
layout: {layout}
save: {{dir: {run}, every: 1000}}
"""


@dataclass
class Run:
    """Steps of a layout on a corpus: measured seconds and the clock's; bytes of the fullest rank, and of its tensors by the ledger.
    Mutable."""

    measured: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    ledger_bytes: int = 0

    @property
    def seconds(self) -> float:
        return statistics.median(self.measured)

    @property
    def clock(self) -> float:
        return statistics.median(self.predicted)


class Corpus:
    """A corpus in a folder, and what was trained on it. Mutable."""

    def __init__(self, name: str, folder: Path, cluster: Cluster, steps: int):
        self.name, self.folder, self.cluster, self.steps = name, folder, cluster, steps
        self.runs: dict[str, Run] = {}
        folder.mkdir()
        lines = (json.dumps({"text": text}) for text in texts(name))
        (folder / "corpus.jsonl").write_text("\n".join(lines), encoding="utf-8")

    def config(self, layout: str, run: str = "none") -> Config:
        return parse_config(CONFIG.format(steps=self.steps, layout=layout, folder=self.folder, run=run))

    def train(self, layout: str) -> Run:
        """One more run of a layout; its first step is not counted."""
        found = self.runs.setdefault(layout, Run())
        with tempfile.TemporaryDirectory(dir=self.folder) as run:
            config, file = self.config(layout, f"{run}/run"), Path(run, "run.yaml")
            file.write_text(config.to_yaml(), encoding="utf-8")
            command = [sys.executable, "-m", "longshift.cli", "train", str(file), "--json"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows = [row for row in map(json.loads, done.stdout.splitlines()) if "step" in row]
        found.measured += [row["seconds"] for row in rows[1:]]
        found.peak_bytes = max(found.peak_bytes, *(row["memory_bytes"] for row in rows))
        if not found.predicted:
            shape = shape_of(config, self.cluster.devices_per_node, self.cluster)
            found.ledger_bytes = most(needs(shape, config.edges, "gloo", True)).device.total
            forecast = RunForecast(config, self.cluster, shape)
            found.predicted = [forecast.step(lengths).seconds for lengths in self.batches(config)][1:]
        say(f"{self.name}, {layout}: {found.seconds:.3f} s, on the clock {found.clock:.3f} s, {found.peak_bytes >> 20} MiB")
        return found

    def batches(self, config: Config) -> Iterator[list[int]]:
        """Lengths of the documents of the run's steps."""
        data, train, (_, cache) = config.data, config.train, open_corpus(config, verify=False)
        batches = Batches(cache, train.seed, train.tokens_per_step, data.max_len, data.overlong)
        cursor = batches.at(0).cursor
        for _ in range(train.steps):
            batch = batches.at(cursor)
            yield [len(document.ids) for document in batch.documents]
            cursor = batch.next_cursor

    def task(self, memory_bytes: int) -> Task:
        """What is planned for this corpus and so many bytes of tensors."""
        config = self.config("dp2")
        lengths = cut(Lengths.from_array(open_corpus(config, verify=False)[1].lengths), config)
        train = config.train
        task = Task(config.spec, self.cluster, lengths, train.tokens_per_step, train.precision, 2)
        return Task(**{**vars(task), "memory_bytes": memory_bytes * memory_bytes / task_budget(task, memory_bytes)})

    @property
    def base_bytes(self) -> int:
        """What processes have besides their tensors, as the calibrating runs show."""
        return max(self.runs[layout].peak_bytes - self.runs[layout].ledger_bytes for layout in CALIBRATING)

    def forecast_bytes(self, run: Run) -> float:
        return HOLES * (self.base_bytes + run.ledger_bytes)

    def rows(self) -> list[dict]:
        factor = statistics.geometric_mean(self.runs[layout].seconds / self.runs[layout].clock for layout in CALIBRATING)
        return [
            {
                "corpus": self.name,
                "layout": layout,
                "measured_s": run.seconds,
                "spread": (max(run.measured) - min(run.measured)) / run.seconds,
                "predicted_s": run.clock,
                "raw": run.clock / run.seconds - 1,
                "calibrated": factor * run.clock / run.seconds - 1,
                "peak_bytes": run.peak_bytes,
                "forecast": self.forecast_bytes(run) / run.peak_bytes - 1,
                "calibrates": layout in CALIBRATING,
            }
            for layout, run in self.runs.items()
        ]

    def budget(self, share: float) -> dict:
        """What the planner chooses for a share of what dp2's tensors need, trained."""
        tensors = int(share * self.runs["dp2"].ledger_bytes)
        limit = HOLES * (self.base_bytes + tensors)
        found = Planned(task := self.task(tensors), search(task))

        def written(way: Way) -> str:
            layout = found.layout(way)
            return layout if isinstance(layout, str) else json.dumps(layout)

        tried = [written(way) for way in found.choice.ways[:3]]
        alike = found.choice.context_parallel
        for layout in [*tried, *([written(alike)] if alike else [])]:
            if layout not in self.runs or layout not in SINGLE:
                self.train(layout)
        within = {layout: self.runs[layout].seconds for layout in SINGLE if layout in self.runs and self.runs[layout].peak_bytes <= limit}
        auto = min(tried, key=lambda layout: self.runs[layout].seconds)
        auto_s, best = self.runs[auto].seconds, min(within, key=within.__getitem__, default=None)
        return {
            "corpus": self.name,
            "share": share,
            "tensors_bytes": tensors,
            "tried": tried,
            "auto": auto,
            "auto_s": auto_s,
            "best_static": best,
            "auto_over_best_static": within[best] / auto_s if best else None,
            "auto_over_context_parallel": self.runs[written(alike)].seconds / auto_s if alike else None,
            "first_over_auto": self.runs[tried[0]].seconds / auto_s,
            "most_of_limit": max(self.runs[layout].peak_bytes for layout in tried) / limit,
        }


def task_budget(task: Task, memory_bytes: int) -> float:
    """Bytes of tensors that a plan for a device of so many bytes may have."""
    return Task(**{**vars(task), "memory_bytes": memory_bytes}).budget_bytes


def texts(name: str) -> Iterator[str]:
    """Documents with the lengths of a corpus, SHRINK times shorter, as pieces of source text."""
    library = sorted(Path(json.__file__).parents[1].glob("*.py"))
    sizes = [len(path.read_text(encoding="utf-8", errors="replace")) for path in library]
    blob = "".join(path.read_text(encoding="utf-8", errors="replace") for path in library)
    random_ = np.random.default_rng(0)
    if name == "python":
        lengths = random_.choice(np.array(sizes) / CHARACTERS, DOCUMENTS)
    else:
        found = read_lengths(LENGTHS / f"{name}.csv")
        lengths = random_.choice(found.lengths, DOCUMENTS, p=found.counts / found.counts.sum())
    for length in np.clip(lengths / SHRINK, 8, 1 << 13):
        start = int(random_.integers(0, len(blob) - int(length * CHARACTERS) - 1))
        yield blob[start : start + int(length * CHARACTERS)]


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    names = CORPORA[1:2] if args.quick else CORPORA
    layouts, steps = ([*CALIBRATING, GROUPS[0]], 3) if args.quick else ([*SINGLE, *GROUPS], 5)
    rows, budgets, regrets = [], [], []
    with tempfile.TemporaryDirectory() as scratch:
        profile = Path(scratch, "profile.json")
        command = [sys.executable, "-m", "longshift.cli", "profile", "--quick", "--fresh", "-o", str(profile)]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        cluster = on_cluster(files.load(profile), 2)
        for number, name in enumerate(names):
            corpus = Corpus(name, Path(scratch, name), cluster, steps)
            for layout in random.Random(number).sample(layouts, len(layouts)):
                corpus.train(layout)
            least = min(run.seconds for run in corpus.runs.values())
            regrets.append(min(corpus.runs.values(), key=lambda run: run.clock).seconds / least - 1)
            budgets += [corpus.budget(share) for share in (SHARES[:1] if args.quick else SHARES)]
            rows += corpus.rows()
    judged = [row for row in rows if not row["calibrates"]]
    static = [one["auto_over_best_static"] for one in budgets if one["auto_over_best_static"]]
    alone = [one["auto_over_context_parallel"] for one in budgets if one["auto_over_context_parallel"]]
    summary = {
        "median_raw": statistics.median(abs(row["raw"]) for row in rows),
        "median_calibrated": statistics.median(abs(row["calibrated"]) for row in judged),
        "worst_calibrated": max(abs(row["calibrated"]) for row in judged),
        "regret_first": max(regrets),
        "memory_least": min(row["forecast"] for row in rows),
        "memory_most": max(row["forecast"] for row in rows),
        "auto_over_best_static_least": min(static),
        "auto_over_best_static_most": max(static),
        "auto_over_context_parallel_least": min(alone, default=None),
        "most_of_limit": max(one["most_of_limit"] for one in budgets),
        "budgets": budgets,
    }
    publish("plan_choice", summary, rows, args.json)


if __name__ == "__main__":
    main()
