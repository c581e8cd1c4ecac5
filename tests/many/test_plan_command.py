"""`longshift plan` and `layout: auto` as a person meets them: what is said, what is written, what is refused, what is chosen again."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from longshift.config_file import load_config
from longshift.documents.tokenizer import train as train_tokenizer
from longshift.layout.layout import Layout
from longshift.planner.search import MAX_TRIALS, NEAR
from longshift.simulate.calibrate import BAND, ERROR, band_of_errors
from longshift.trainer.metrics import read_rows
from longshift.trainer.plan_file import PlanFile, fastest_trial, place
from longshift.trainer.step_measurements import RECENT

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = """\
model: {{preset: {model}}}
data:
  train: [{{path: {folder}/*.txt}}]
  tokenizer: {folder}/tokenizer.json
  max_len: 64
  overlong: split
  cache: {folder}/cache
train: {{tokens_per_step: 256, steps: 27, lr: 1e-3, precision: float32}}
layout: {layout}
save: {{dir: {folder}/run, every: 100}}
"""


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    """A home folder of the tests' own: this machine's profile is measured there, once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


def longshift(line: str, torch: bool = True) -> subprocess.CompletedProcess:
    """Run a command line in a process of its own; without `torch`, exit code 99 says that it was imported."""
    script = "import os, sys, atexit\nfrom longshift.cli import main\n"
    script += "" if torch else "atexit.register(lambda: 'torch' in sys.modules and os._exit(99))\n"
    return subprocess.run([sys.executable, "-c", script + "main()", *shlex.split(line)], capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    text = Path(re.__file__).read_text()
    for n in range(8):
        (tmp_path / f"{n}.txt").write_text(text[500 * n : 500 * n + 50 * (n + 1)])
    train_tokenizer(iter([text]), 300).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "run.yaml").write_text(CONFIG.format(folder=tmp_path, model="tiny-llama", layout="{auto: {ranks: 2}}"))
    return tmp_path


PLAN = f"plan {EXAMPLES}/auto.yaml --on 8xH100 --lengths {EXAMPLES}/lengths/github.csv train.tokens_per_step=256K"


def test_plan_says_and_writes_what_is_best(tmp_path):
    done = longshift(f"{PLAN} --json --trace {tmp_path}/trace.json --emit {tmp_path}/best.yaml")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    best = found["best"]
    assert found["fits"]
    assert best["least_s"] < best["seconds"] < best["most_s"]
    assert best["seconds"] <= min(found["single"]["seconds"], found["context_parallel"]["seconds"])
    assert best["bytes"]["device"] <= found["budget_bytes"] < 80e9
    assert sum(found["refused"].values()) < found["candidates"]
    tried = [way["seconds"] for way in found["tried"]]
    assert 2 <= len(tried) <= MAX_TRIALS
    assert max(tried) <= max(NEAR * best["seconds"], found["single"]["seconds"])
    assert best["layout"] in [way["layout"] for way in found["tried"][:2]]
    assert sum(row["tokens"] for row in best["groups"]) >= found["tokens_per_step"]
    assert sum(row["seconds"] for row in best["groups"]) == pytest.approx(best["seconds"])
    config = load_config(tmp_path / "best.yaml")
    assert config.model_dump(mode="json")["layout"] == best["layout"]
    assert config.world == 8
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    computed = [event["dur"] for event in trace if event["ph"] == "X" and event["name"].startswith("compute")]
    assert 0.5 * best["seconds"] < sum(computed) / 1e6 < 9 * best["seconds"]


def test_a_plan_has_room_for_max_len_though_no_document_is_so_long(tmp_path):
    (tmp_path / "lengths").write_text("100\n" * 500 + "9000\n" * 5)
    asked = "train.tokens_per_step=64K data.max_len=16K model.preset=qwen3-0.6b 'layout={auto: {tp: [1, 2], pp: 1, ring: 1}}'"
    done = longshift(f"plan {EXAMPLES}/auto.yaml {asked} --on 2xH100 --lengths {tmp_path}/lengths --emit {tmp_path}/best.yaml --json")
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout)["best"]["groups"][-1]
    assert (last["upto"], last["pack"] >= 16384) == (16384, True)
    assert load_config(tmp_path / "best.yaml").edges[-1].upto == 16384


def test_what_is_fixed_is_kept():
    found = json.loads(longshift(f"{PLAN} --json 'layout={{auto: {{tp: 4, pp: 2}}}}'").stdout)
    layouts = [found["best"]["layout"], *(way["layout"] for way in found["rivals"])]
    texts = [one if isinstance(one, str) else one[-1]["use"] for one in layouts]
    assert all((layout.tp, layout.pp) == (4, 2) for layout in map(Layout.parse, texts))


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (f"plan {EXAMPLES}/auto.yaml --on 64xh10", 2, "did you mean 'h100'"),
        (f"plan {EXAMPLES}/auto.yaml --on 8xH100 --fabric fast", 2, "write the bits a second"),
        (f"plan {EXAMPLES}/auto.yaml --on 8xH100 --lengths none.csv", 2, "none.csv does not exist"),
        (f"{PLAN} --trace /nowhere/t.json", 2, "name a file in a folder that exists"),
        (f"{PLAN.replace('8x', '2x')} model.preset=llama-3-70b data.max_len=2K", 2, "devices: "),
    ],
    ids=lambda value: str(value).replace(str(EXAMPLES), "examples"),
)
def test_what_cannot_be_planned_is_said(line, code, said):
    done = longshift(line)
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_auto_trains_the_best_few_and_goes_on_with_one(folder):
    """Losses are those of one process: whatever was tried, the steps are the run's own."""
    done = longshift(f"train {folder}/run.yaml")
    assert done.returncode == 0, done.stderr
    plan = PlanFile.from_json(place(folder / "run").read_text())
    assert plan.asked == {"auto": {"ranks": 2}}
    assert len(plan.trials) == len(plan.choices)
    assert plan.chosen == fastest_trial(plan.trials)
    assert all(len(trial.measured_s) == len(trial.clock_s) == 3 for trial in plan.trials)
    rows = read_rows(folder / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 28))
    (folder / "alone.yaml").write_text(CONFIG.format(folder=folder, model="tiny-llama", layout="dp1"))
    assert longshift(f"train {folder}/alone.yaml save.dir={folder}/alone").returncode == 0
    alone = [row["loss"] for row in read_rows(folder / "alone" / "metrics.jsonl")]
    assert [row["loss"] for row in rows] == pytest.approx(alone, rel=1e-5)
    again = longshift(f"train {folder}/run.yaml --resume train.steps=29")
    assert again.returncode == 0, again.stderr
    assert "as " + str(place(folder / "run")) in again.stderr
    assert PlanFile.from_json(place(folder / "run").read_text()) == plan
    trials = 4 * len(plan.choices)
    rows = read_rows(folder / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if row["first"]] == [*range(1, trials + 2, 4), 28]
    assert [row["layout"] for row in rows] == [plan.choices[n // 4] if n < trials else plan.layout for n in range(29)]
    assert plan.calibration is not None
    assert len(plan.calibration.errors) == trials - len(plan.choices)
    predicted = {row["step"]: row for row in rows if "predicted_seconds" in row}
    assert {trials + 2, 29} <= predicted.keys() <= {*range(trials + 2, 28), 29}
    assert predicted[trials + 2]["band"] == band_of_errors(plan.calibration.errors[-RECENT:])
    assert all(0 < row["predicted_seconds"] < 60 and row["band"] >= ERROR for row in predicted.values())


def test_auto_keeps_the_home_that_the_config_names(folder):
    """Trials end in checkpoints, so that each has its own file of records. Losses are those of one process whose home is its memory."""
    done = longshift(f"train {folder}/run.yaml home=disk train.steps=17")
    assert done.returncode == 0, done.stderr
    assert "layout: auto: then" in done.stderr
    (folder / "alone.yaml").write_text(CONFIG.format(folder=folder, model="tiny-llama", layout="dp1"))
    assert longshift(f"train {folder}/alone.yaml save.dir={folder}/alone train.steps=17").returncode == 0
    rows, alone = (read_rows(folder / name / "metrics.jsonl") for name in ("run", "alone"))
    assert all(row["home"]["written_bytes"] > 0 for row in rows)
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in alone], rel=1e-5)


def test_a_run_calibrates_the_cluster_that_a_plan_is_made_on(folder):
    run = folder / "run"
    done = longshift(f"train {folder}/run.yaml layout=dp2 train.steps=7")
    assert done.returncode == 0, done.stderr
    assert not any("predicted_seconds" in row for row in read_rows(run / "metrics.jsonl"))
    done = longshift(f"calibrate {run} --json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [row["step"] for row in told["rows"]] == [2, 3, 4, 5, 6, 7]
    assert told["layouts"] == ["dp2"]
    assert told["file"] == str(run / "cluster.json")
    plans = []
    for on in ("", f"--on {run}/cluster.json"):
        done = longshift(f"plan {folder}/run.yaml {on} --json 'layout={{auto: {{ranks: 2, dp: 2, z: 0}}}}'")
        assert done.returncode == 0, done.stderr
        plans.append(json.loads(done.stdout)["best"])
    bands = [one["most_s"] / one["seconds"] - 1 for one in plans]
    assert bands == pytest.approx([BAND, told["band"]])
    assert plans[0]["seconds"] != pytest.approx(plans[1]["seconds"], rel=1e-3)
    said = longshift(f"calibrate {run} -o {folder}/other.json").stdout
    assert "with those of the other steps" in said
    assert (folder / "other.json").exists()


def test_a_run_that_was_stopped_in_a_trial_goes_on_with_its_plan(folder):
    assert longshift(f"train {folder}/run.yaml train.steps=6").returncode == 0
    stopped = PlanFile.from_json(place(folder / "run").read_text())
    assert (len(stopped.trials), stopped.chosen) == (1, None)
    assert longshift(f"train {folder}/run.yaml --resume train.steps=13").returncode == 0
    ended = PlanFile.from_json(place(folder / "run").read_text())
    assert ended.choices == stopped.choices
    assert ended.trials[0] == stopped.trials[0]


def test_a_plan_that_another_run_left_is_not_followed(folder):
    (folder / "run").mkdir()
    place(folder / "run").write_text(PlanFile("auto", ("dp1", "dp1.recompute-full")).to_json())
    assert longshift(f"train {folder}/run.yaml layout=dp1 train.steps=1").returncode == 0
    assert not place(folder / "run").exists()


def test_a_damaged_plan_is_refused(folder):
    (folder / "run").mkdir()
    place(folder / "run").write_text("{")
    done = longshift(f"train {folder}/run.yaml")
    assert done.returncode == 4
    assert "remove it" in done.stderr
