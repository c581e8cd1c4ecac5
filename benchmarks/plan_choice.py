"""Does the clock order layouts as a run does? Two plain ranks train under layouts and groups of lengths; the same steps on the clock.

This machine is profiled, then every layout is a run of its own by `longshift train`, in an order drawn anew each round. A row compares the
median seconds of its steps with the clock's for the same documents: as they are (`raw`), and times one factor that three runs give, one
dp, one tp, one pp (`calibrated`). `regret_first`: how much longer the layout that the clock puts first takes than the fastest one.
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import arguments, publish, say

from longshift.cluster import files
from longshift.cluster.cluster import Cluster
from longshift.config import Config, parse_config
from longshift.data.batch import Batches
from longshift.explain import shape_of
from longshift.forecast import RunForecast, on_cluster
from longshift.train.corpus import open_corpus

SINGLE = (
    *("dp2", "dp2.z1", "dp2.z2", "dp2.z3", "tp2", "u2", "ring2", "pp2", "dp2.recompute-full", "tp2.recompute-full", "u2.z3"),
    *("dp2.recompute-attention", "pp2.v2", "dp2.chunk1K.disk"),
)
GROUPS = (
    *("[{upto: 512, use: dp2, pack: 2K}, {upto: 2K, use: tp2}]", "[{upto: 1K, use: dp2}, {upto: 2K, use: u2}]"),
    *("[{upto: 512, use: u2}, {upto: 2K, use: pp2}]", "[{upto: 256, use: dp2, pack: 1K}, {upto: 1K, use: u2}, {upto: 2K, use: tp2}]"),
)
CALIBRATING = ("dp2", "tp2", "pp2")
CONFIG = """
model: {{preset: tiny-llama}}
data: {{train: [{{corpus: python}}], max_len: 2K, overlong: split}}
train: {{tokens_per_step: 16K, steps: {steps}, lr: 3e-4, precision: float32}}
layout: {layout}
save: {{dir: {folder}/run, every: 1000}}
"""


def trained(config: Config, folder: Path) -> list[float]:
    """Seconds of the run's steps."""
    file = folder / "run.yaml"
    file.write_text(config.to_yaml(), encoding="utf-8")
    command = [sys.executable, "-m", "longshift.cli", "train", str(file), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [row["seconds"] for row in map(json.loads, done.stdout.splitlines()) if "step" in row]


def clocked(config: Config, cluster: Cluster) -> list[float]:
    """The clock's seconds for the same steps."""
    forecast = RunForecast(config, cluster, shape_of(config, cluster.devices_per_node, cluster))
    _, cache = open_corpus(config, verify=False)
    data, train = config.data, config.train
    batches = Batches(cache, train.seed, train.tokens_per_step, data.max_len, data.overlong)
    found, cursor = [], batches.at(0).cursor
    for _ in range(train.steps):
        batch = batches.at(cursor)
        found.append(forecast.step([len(document.ids) for document in batch.documents]).seconds)
        cursor = batch.next_cursor
    return found


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    layouts = [*CALIBRATING, GROUPS[0]] if args.quick else [*SINGLE, *GROUPS]
    rounds, steps = (1, 3) if args.quick else (1, 6)
    measured: dict[str, list[float]] = {layout: [] for layout in layouts}
    predicted: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        profile = Path(scratch, "profile.json")
        command = [sys.executable, "-m", "longshift.cli", "profile", "--quick", "--fresh", "-o", str(profile)]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        cluster = on_cluster(files.load(profile), 2)
        for number in range(rounds):
            for layout in random.Random(number).sample(layouts, len(layouts)):
                with tempfile.TemporaryDirectory(dir=scratch) as folder:
                    config = parse_config(CONFIG.format(steps=steps, layout=layout, folder=folder))
                    measured[layout] += trained(config, Path(folder))[1:]
                    predicted[layout] = predicted.get(layout) or clocked(config, cluster)[1:]
                say(f"{layout}: {statistics.median(measured[layout]):.3f} s, on the clock {statistics.median(predicted[layout]):.3f} s")
    seconds = {layout: statistics.median(some) for layout, some in measured.items()}
    clock = {layout: statistics.median(some) for layout, some in predicted.items()}
    factor = statistics.geometric_mean(seconds[layout] / clock[layout] for layout in CALIBRATING)
    rows = [
        {
            "layout": layout,
            "measured_s": seconds[layout],
            "spread": (max(measured[layout]) - min(measured[layout])) / seconds[layout],
            "predicted_s": clock[layout],
            "raw": clock[layout] / seconds[layout] - 1,
            "calibrated": factor * clock[layout] / seconds[layout] - 1,
        }
        for layout in layouts
    ]
    judged = [abs(row["calibrated"]) for row in rows if row["layout"] not in CALIBRATING]
    first = min(layouts, key=clock.__getitem__)
    best_of_3 = min(seconds[layout] for layout in sorted(layouts, key=clock.__getitem__)[:3])
    summary = {
        "median_raw": statistics.median(abs(row["raw"]) for row in rows),
        "median_calibrated": statistics.median(judged),
        "worst_calibrated": max(judged),
        "regret_first": seconds[first] / min(seconds.values()) - 1,
        "regret_best_of_3": best_of_3 / min(seconds.values()) - 1,
    }
    publish("plan_choice", summary, rows, args.json)


if __name__ == "__main__":
    main()
