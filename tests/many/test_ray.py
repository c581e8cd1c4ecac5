"""`longshift train --on ray`: ranks on the actors of a Ray that is started here, restarts on the devices that are left, and refusals."""

import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch

import longshift as ls
from longshift.config_file import load_config, parse_config
from longshift.dist.world import World
from longshift.documents.tokenizer import train as train_tokenizer
from longshift.errors import DataError, LongshiftError, NonFiniteError, PeerError, UsageError
from longshift.layout.box import Box
from longshift.state.checkpoint import Checkpoint
from longshift.step_report import layout_text
from longshift.trainer.metrics import read_rows
from longshift.trainer.resume_config import fit_ranks
from longshift.trainer.run_folder import Cause, RunFolder

STEPS = 12
CONFIG = """
model: {{preset: tiny-llama}}
data: {{train: [{{path: {place}/text.txt}}], tokenizer: {place}/tokenizer.json, max_len: 64, overlong: split, cache: {place}/cache}}
train: {{tokens_per_step: 256, steps: {steps}, lr: {lr}, precision: float64}}
layout: {layout}
save: {{dir: {place}/{run}, every: 2}}
"""
STARTING_S = 300  # Ray takes ten seconds of an idle machine


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a text, its tokenizer and `run.yaml`."""
    text = Path(__file__).with_name("text.txt").read_text()
    (tmp_path / "text.txt").write_text(text)
    train_tokenizer(iter([text]), 300).save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path)
    return tmp_path


def write_config(place: Path, layout: str = "dp4", run: str = "run", lr: str = "1e-3", steps: int = STEPS) -> Path:
    file = place / f"{run}.yaml"
    file.write_text(CONFIG.format(place=place, layout=layout, run=run, lr=lr, steps=steps))
    return file


@contextmanager
def training(file: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """`longshift train FILE --on ray` on a Ray of its own, which ends with the block."""
    command = [sys.executable, "-m", "longshift.cli", "train", str(file), "--on", "ray", "--crowded", *words]
    given = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        deadline = threading.Timer(STARTING_S, child.kill)
        deadline.start()
        try:
            yield child
        finally:
            deadline.cancel()
            for process in psutil.Process(child.pid).children(recursive=True) if child.poll() is None else ():
                process.kill()
            child.kill()


def wait_for_step(child: subprocess.Popen[str], step: int) -> list[str]:
    """Lines of a run up to this step's."""
    assert child.stdout
    lines = []
    for line in child.stdout:
        lines.append(line)
        if line.startswith(f"step {step}/"):
            return lines
    raise AssertionError((lines, child.stderr.read() if child.stderr else ""))


def wait_for_checkpoint(run: Path) -> None:
    """Until a run's first checkpoint is whole, which steps do not wait for."""
    deadline = time.monotonic() + STARTING_S
    while not RunFolder(run).latest.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def started_by(parent: psutil.Process) -> tuple[dict[str, psutil.Process], list[psutil.Process]]:
    """The ranks that a command has started, by name, and all that it has started."""
    started = parent.children(recursive=True)
    ranks = {}
    for process in started:
        with suppress(psutil.NoSuchProcess):  # Ray has processes that are soon over
            if process.name().startswith("longshift-r"):
                ranks[process.name()] = process
    return ranks, started


def listening(processes: list[psutil.Process]) -> list[str]:
    """The addresses on which processes listen."""
    addresses = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            addresses += [c.laddr.ip.removeprefix("::ffff:") for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return addresses


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Master weights and moments of a run's newest checkpoint."""
    config, saved = load_config(run / "config.yaml"), Checkpoint.latest(run, World.alone())
    kinds = ("master", *config.train.rule.moments)
    return {f"{kind} {p.name}": saved.read(kind, p.name, Box.whole(p.shape)) for p in config.spec.params for kind in kinds}


@pytest.fixture
def ray_launch():
    """The module that starts ranks on Ray."""
    pytest.importorskip("ray")
    return importlib.import_module("longshift.trainer.ray_launch")


def test_a_run_whose_actor_is_killed_goes_on_with_three_of_four_and_ends_with_the_weights_of_one_process(place):
    """Killed after step 3's line, with a whole checkpoint. In float64, so that only rounding of another order of sums differs."""
    pytest.importorskip("ray")
    with training(place / "run.yaml") as child:
        wait_for_step(child, 3)
        wait_for_checkpoint(place / "run")
        ranks, started = started_by(psutil.Process(child.pid))
        actor = ranks["longshift-r1"].parent()
        assert actor
        assert actor.name().startswith("ray::")
        addresses = listening(started)
        actor.kill()
        _, err = child.communicate()
    assert child.returncode == 0, err
    assert set(addresses) <= {"127.0.0.1", "::1"}
    assert len(addresses) > 4

    lost, change, going_on = [line for line in err.splitlines() if line.startswith("longshift: ")]  # Ray has lines of its own
    assert lost == "longshift: rank 1 was lost: its actor's worker process has died; 3 of 4 devices are left"
    assert change == "longshift: layout dp4 becomes dp3"
    saved = int(going_on.partition("/checkpoints/step-")[2].split(";")[0])
    assert saved in range(2, STEPS, 2)
    rows = read_rows(place / "run/metrics.jsonl")
    assert [(row["step"], row["layout"]) for row in rows] == [(n, "dp4" if n <= saved else "dp3") for n in range(1, STEPS + 1)]

    assert len(list(ls.train(write_config(place, "dp1", "alone")))) == STEPS
    alone, resumed = weights(place / "alone"), weights(place / "run")
    assert alone.keys() == resumed.keys()
    assert max(float((alone[name] - resumed[name]).abs().max()) for name in alone) < 1e-12


def test_a_rank_that_is_killed_is_started_again_on_all_devices_and_leaving_the_loop_saves(place, monkeypatch, capfd):
    """Its actor lives, and with it the device. From Python, which passes Ctrl-C on to the command."""
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    file = write_config(place, "dp2", "left", steps=5000)
    seen: list[int] = []
    started: list[psutil.Process] = []
    before = psutil.Process().children(recursive=True)  # ranks of other cases
    steps = ls.train(file, on="ray:2", crowded=True)
    for step in steps:
        seen.append(step.step)
        if len(seen) == 3:
            wait_for_checkpoint(place / "left")
            ranks, children = started_by(psutil.Process())
            started = [process for process in children if process not in before]
            ranks["longshift-r1"].kill()
        if len(seen) > 3 and step.first:  # of the ranks that were started again
            break
    steps.close()
    assert seen[-1] > 1
    assert seen[-1] % 2  # the step after a checkpoint
    rows = read_rows(place / "left/metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert {row["layout"] for row in rows} == {"dp2"}
    assert "going on from" in capfd.readouterr().err
    assert RunFolder(place / "left").steps_saved() == rows[-1]["step"] < 5000
    assert len(started) > 6
    assert not psutil.wait_procs(started, timeout=30)[1]


class Devices:
    """Devices of a test: how many are left."""

    def __init__(self, count: int):
        self.places = list(range(count))

    def reserve(self, ranks: int) -> None:
        assert ranks == len(self.places)

    def drop(self, ranks: set[int]) -> None:
        self.places = [place for rank, place in enumerate(self.places) if rank not in ranks]


def cause_of(error: Exception, rank: int = 0) -> Cause:
    return Cause(rank=rank, kind=type(error).__name__, message=str(error))


LOST = cause_of(PeerError("rank 1 was lost"), 1)


def play(ray_launch, place: Path, outcomes, layout: str = "dp4", restarts: int = 3) -> list[str]:
    """What is said, and the layouts of the starts, where starts end as `outcomes` say: a cause, the ranks that are lost, and the newest
    checkpoint by then."""
    config = load_config(write_config(place, layout))
    folder = RunFolder(Path(config.save.dir))
    said: list[str] = []
    waiting = list(outcomes)

    class Played(ray_launch.RayRun):
        def _start(self, config, resume, interrupts):
            said.append(f"start {config.layout}{' --resume' * resume}")
            cause, lost, step = waiting.pop(0)
            if step:
                folder.path.mkdir(exist_ok=True)
                folder.latest.write_text(f"step-{step}\n")
            return cause, set(lost)

    refit = lambda left: (fit_ranks(config, left), None)  # noqa: E731
    Played(Devices(config.world), folder, [], refit, restarts, said.append).train(config, False)
    assert not waiting
    return said


def test_a_run_goes_on_with_fewer_replicas_after_each_loss(ray_launch, place):
    """dp2.tp2 on 3 devices is tp2, and one is not used; on 1 it is the nearest of one rank."""
    said = play(ray_launch, place, [(LOST, [1], 0), (LOST, [1], 2), (LOST, [0], 4), (None, [], 8)], "dp2.tp2")
    folder = place / "run"
    assert said == [
        "start dp2.tp2",
        "rank 1 was lost; 3 of 4 devices are left",
        "layout dp2.tp2 becomes tp2",
        "1 of the devices that are left is not used",
        "going on from the start, as there is no checkpoint yet",
        "start tp2",
        "rank 1 was lost; 2 of 3 devices are left",
        f"going on from {folder}/checkpoints/step-2",
        "start tp2 --resume",
        "rank 1 was lost; 1 of 2 devices are left",
        "layout tp2 becomes dp1",
        f"going on from {folder}/checkpoints/step-4",
        "start dp1 --resume",
    ]


@pytest.mark.parametrize("error", [DataError("line 7"), NonFiniteError("step 3"), UsageError("no"), LongshiftError("a bug")])
def test_a_failure_that_would_repeat_is_not_started_again(ray_launch, place, error):
    with pytest.raises(type(error), match=str(error)):
        play(ray_launch, place, [(cause_of(error), [], 2)])


def test_losses_without_a_new_checkpoint_end_the_run_and_a_checkpoint_starts_the_count_again(ray_launch, place):
    with pytest.raises(PeerError, match="started 1 times again without a new checkpoint, and not once more: resume with longshift train"):
        play(ray_launch, place, [(LOST, [], 2), (LOST, [], 4), (LOST, [], 4), (None, [], 4)], restarts=1)
    with pytest.raises(PeerError, match="no device is left"):
        play(ray_launch, place, [(LOST, [0, 1, 2, 3], 6)])


def test_a_gpu_that_fails_is_a_loss_and_an_assertion_of_a_kernel_is_none(ray_launch):
    def accelerator_cause(text: str) -> Cause:
        return cause_of(LongshiftError(text)).model_copy(update={"kind": "AcceleratorError"})

    assert ray_launch.is_of_device(accelerator_cause("AcceleratorError: CUDA error: uncorrectable ECC error encountered"))
    assert not ray_launch.is_of_device(accelerator_cause("AcceleratorError: CUDA error: device-side assert triggered"))
    assert not ray_launch.is_of_device(cause_of(DataError("line 7")))


def test_ranks_of_two_machines_find_torchruns_variables(ray_launch):
    """Three on the first machine and one on the second: all believe in three on each."""
    places = [ray_launch.Place(None, node, f"10.0.0.{node}") for node in "1112"]
    found = ray_launch.cluster_environments(places, 29500)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [[environment[name] for name in names] for environment in found] == [
        [str(rank), local, "4", "3", "10.0.0.1", "29500"] for rank, local in enumerate("0120")
    ]
    assert not any("LONGSHIFT_STORE" in environment for environment in found)


@pytest.mark.parametrize(
    ("layout", "devices", "fitted"),
    [
        ("dp4", 3, "dp3"),
        ("dp4.z3", 2, "dp2.z3"),
        ("dp2.tp4.z1", 7, "tp4.z1"),
        ("tp4", 3, "tp3"),
        ("dp2.pp2", 3, "pp2"),
        ("[{upto: 32, use: dp4}, {upto: 64, use: dp2.tp2}]", 3, "dp2 <= 32 > tp2 <= 64"),
        ("auto", 3, "{'auto': {'ranks': 3}}"),
        ("{auto: {tp: 1}}", 3, "{'auto': {'ranks': 3, 'tp': [1]}}"),
    ],
)
def test_fit_ranks(place, layout, devices, fitted):
    config = fit_ranks(load_config(write_config(place, layout)), devices)
    told = config.model_dump(mode="json")["layout"]
    assert (str(told) if isinstance(told, dict) else layout_text(told)) == fitted


def test_fit_ranks_changes_stages_too(place):
    text = write_config(place).read_text().replace(f"steps: {STEPS}", "stages: [{steps: 4}, {steps: 4, layout: dp2.tp2}]")
    config = fit_ranks(parse_config(text), 2)
    assert [str(part.edges[0].use) for part in config.parts] == ["dp2", "tp2"]


def run_command(*words: str, before: str = "pass", **variables: str) -> tuple[int, str]:
    """Exit code of a command and what it tells on standard error; `before`: code that runs first."""
    code = f"import sys; {before}; sys.argv = ['longshift', *sys.argv[1:]]; from longshift.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *words], env=os.environ | variables, capture_output=True, text=True, timeout=200)
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("on", "message"),
    [
        ("ray:2", "layout dp4 is not possible here:\n  dp4 needs 4 ranks, 2 are here: try dp2\n"),
        ("ray:0", "--on ray:0: write --on ray, or --on ray:4 for 4 devices\n"),
        ("slurm", "--on slurm: write --on ray, or --on ray:4 for 4 devices\n"),
    ],
)
def test_what_cannot_be_is_refused_before_ray_starts(place, on, message):
    code, told = run_command("train", str(place / "run.yaml"), "--on", on, before="sys.modules['ray'] = None")
    assert (code, told) == (2, f"longshift: {message}")
    assert not (place / "run").exists()


def test_a_rank_of_a_launcher_does_not_start_ray(place):
    code, told = run_command("train", str(place / "run.yaml"), "--on", "ray", RANK="0", WORLD_SIZE="4")
    assert (code, told.partition(",")[0]) == (2, "longshift: --on ray starts all ranks")


def test_without_ray_the_package_is_named(place):
    told = run_command("train", str(place / "run.yaml"), "--on", "ray", before="sys.modules['ray'] = None")
    assert told == (2, "longshift: --on ray needs a package: pip install 'longshift[ray]'\n")
