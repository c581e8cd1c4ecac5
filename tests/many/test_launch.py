"""Local workers: what they find, what listens, and how a run ends when one of them does. The workers here are real processes; those
that need no torch do without it, and start in a tenth of a second."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import checkpoints  # noqa: F401  (forked ranks need what they call to be imported)
import psutil
import pytest
import torch

import longshift as ls
from longshift.config_file import parse_config
from longshift.dist.world import World
from longshift.documents.tokenizer import train as train_tokenizer
from longshift.errors import DataError, LongshiftError, NonFiniteError, OutOfMemoryError, PeerError, UsageError
from longshift.trainer import launch as launcher
from longshift.trainer import loop
from longshift.trainer.build_run import stages_of
from longshift.trainer.interrupt import ENDING
from longshift.trainer.launch import launch, rank_error
from longshift.trainer.metrics import read_rows
from longshift.trainer.run_folder import Cause, RunFolder, as_error, read_causes, root_cause, write_cause
from longshift.trainer.step_trace import StepTrace

CONFIG = """
model: {{preset: tiny-llama}}
data:
  train: [{{path: {place}/text.txt}}]
  tokenizer: {place}/tokenizer.json
  max_len: 64
  overlong: split
  cache: {place}/cache
train: {{tokens_per_step: 128, steps: {steps}, lr: 1e-3, precision: float32}}
layout: {layout}
save: {{dir: {place}/run, every: 1000}}
"""

PRELUDE = """
import json, os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
"""


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def run(folder: RunFolder, body: str, world: int = 3, held: bool = False) -> list[str]:
    said: list[str] = []
    launch([sys.executable, "-c", PRELUDE + body, str(folder.path)], world, folder, said.append, held=held)
    return said


@contextmanager
def interrupts_when(ready, count: int = 1, number: int = signal.SIGINT) -> Iterator[None]:
    """Ctrl-C, or another signal, for this process, `count` times, once `ready()`. One that comes when the launch is over does nothing."""

    def send() -> None:
        while not ready():
            time.sleep(0.02)
        for _ in range(count):
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    before = signal.signal(number, lambda *_: None)
    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(60)
        signal.signal(number, before)


def test_each_rank_finds_its_place_and_the_caller_keeps_its_environment(folder):
    before = dict(os.environ)
    run(folder, '(folder / f"{rank}.json").write_text(json.dumps(dict(os.environ)))')
    found = [json.loads((folder.path / f"{rank}.json").read_text()) for rank in range(3)]
    assert [(e["RANK"], e["LOCAL_RANK"], e["WORLD_SIZE"]) for e in found] == [(str(r), str(r), "3") for r in range(3)]
    assert {e["OMP_NUM_THREADS"] for e in found} == {str(max(1, len(os.sched_getaffinity(0)) // 3))}
    assert all(e["LONGSHIFT_STORE"].startswith("127.0.0.1:") for e in found)
    assert {e["GLOO_SOCKET_IFNAME"] for e in found} == {"lo"}
    assert {len(e["LONGSHIFT_SECRET"]) for e in found} == {64}
    assert os.environ == before


def test_nothing_listens_beyond_loopback(folder):
    """Ranks of a real gloo world write down what they and the launcher listen on."""
    run(
        folder,
        """
import psutil, torch
from longshift.dist.world import World
world = World.from_environment()
world.prepare([(0, 1)])
group = world.group((0, 1))
assert group.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
me = psutil.Process()
open_ = [c for p in (me, me.parent()) for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
(folder / f"{rank}.json").write_text(json.dumps([c.laddr.ip for c in open_]))
group.all_reduce(torch.ones(1))
os._exit(0)  # as the command line does: gloo's orderly shutdown now and then aborts
""",
        world=2,
    )
    found = [ip for rank in range(2) for ip in json.loads((folder.path / f"{rank}.json").read_text())]
    assert len(found) >= 2  # the store at least
    assert set(found) <= {"127.0.0.1", "::1"}


def test_a_rank_that_is_killed_ends_all_and_is_named(folder, capfd):
    start = time.monotonic()
    with pytest.raises(PeerError, match=r"^rank 1 was ended by SIGKILL; the kernel does this when memory runs out"):
        run(folder, "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(60)")
    assert time.monotonic() - start < 50
    assert capfd.readouterr() == ("", "")  # the launcher's caller prints the cause, once


def test_a_rank_that_sigterm_ends_is_named_before_the_peer_that_loses_it(folder):
    """The launcher ends rank 2 by SIGTERM, too, which is a consequence."""
    body = """
from longshift.errors import PeerError
from longshift.trainer.run_folder import RunFolder, write_cause
if rank == 1:
    os.kill(os.getpid(), signal.SIGTERM)
if rank == 0:
    write_cause(RunFolder(folder), rank, PeerError("rank 0 lost its peers"))
time.sleep(60)
"""
    with pytest.raises(PeerError, match=r"^rank 1 was ended by SIGTERM$"):
        run(folder, body)


def test_the_first_cause_is_raised_in_its_own_class(folder, capfd):
    """Rank 2 fails of itself; rank 0 sees only that a peer is gone, and says so first."""
    with pytest.raises(DataError, match=r"^line 7 is bad$") as caught:
        run(
            folder,
            """
from longshift.errors import DataError, PeerError
from longshift.trainer.run_folder import RunFolder, write_cause
if rank == 1: time.sleep(60)
write_cause(RunFolder(folder), rank, PeerError("rank 2 is gone") if rank == 0 else DataError("line 7 is bad"))
while len(list((folder / "errors").glob("rank-*.json"))) < 2: time.sleep(0.01)
sys.exit(1)
""",
        )
    assert caught.value.exit_code == 3
    failed = max(file.stat().st_mtime for file in folder.errors.iterdir())
    assert time.time() - failed < 5
    assert capfd.readouterr() == ("", "")


def test_a_cause_that_cannot_be_written_is_told(folder):
    """By the store: where `errors` should be made stands a file."""
    with pytest.raises(OutOfMemoryError, match=r"^/the/file cannot be written: No space left on device; make room, ") as caught:
        run(
            folder,
            """
import errno
from longshift.trainer.launch import rank_error, tell
from longshift.trainer.run_folder import RunFolder, write_cause
if rank != 1: time.sleep(60)
(folder / "errors").write_text("")
tell(write_cause(RunFolder(folder), rank, rank_error(OSError(errno.ENOSPC, "No space left on device", "/the/file"), rank)))
sys.exit(1)
""",
        )
    assert caught.value.exit_code == 7
    assert not read_causes(folder)


def test_a_value_that_no_rank_has_written_is_refused(folder):
    """A stranger writes what rank 1 would tell rank 0, and a cause, before they are asked for; it knows all but the secret."""
    with pytest.raises(PeerError, match=r"the store of this run holds '.*', which none of its ranks has written") as caught:
        run(
            folder,
            """
from datetime import timedelta
import torch.distributed as dist
from longshift.dist.world import World, launchers_store
from longshift.trainer.launch import rank_error, tell
from longshift.trainer.run_folder import RunFolder, write_cause
host, port = os.environ["LONGSHIFT_STORE"].split(":")
stranger = dist.TCPStore(host, int(port), is_master=False)
if rank == 1:
    sealed = launchers_store(timedelta(seconds=20))
    sealed.set("mine", b"word")
    assert sealed.get("mine") == b"word"
    stranger.set("other", stranger.get("mine"))  # the seal of one key is not that of another
    stranger.set("ready", "")
    time.sleep(60)
stranger.wait(["ready"])
try:
    launchers_store(timedelta(seconds=20)).get("other")
except Exception as fault:
    tell(write_cause(RunFolder(folder), rank, rank_error(fault, rank)))
sys.exit(1)
""",
            world=2,
        )
    assert "'other'" in str(caught.value)


def test_a_rank_does_not_join_a_peer_that_a_stranger_names(folder):
    """Where gloo will look for the address of rank 1 stands what rank 0 wrote for its own."""
    with pytest.raises(PeerError, match=r"the store of this run holds '.*/1', which none of its ranks has written"):
        run(
            folder,
            """
import torch.distributed as dist
from longshift.dist.world import World
from longshift.trainer.launch import rank_error, tell
from longshift.trainer.run_folder import RunFolder, write_cause
if rank == 1:
    host, port = os.environ["LONGSHIFT_STORE"].split(":")
    stranger = dist.TCPStore(host, int(port), is_master=False)
    while not (keys := [key for key in stranger.list_keys() if key.endswith("/0")]): time.sleep(0.02)
    stranger.set(keys[0].removesuffix("0") + "1", stranger.get(keys[0]))
    time.sleep(60)
try:
    World.from_environment(20)
except Exception as fault:
    tell(write_cause(RunFolder(folder), rank, rank_error(fault, rank)))
os._exit(1)
""",
            world=2,
        )


def test_fewer_gpus_than_ranks_are_told_before_anything_starts(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match=r"^3 ranks need a GPU each, and this machine has 1: "):
        run(folder, "raise AssertionError")


def test_old_causes_do_not_count(folder):
    write_cause(folder, 0, DataError("from the last time"))
    with pytest.raises(LongshiftError, match="ended with exit code 9"):
        run(folder, "sys.exit(9)", world=1)


WAITS_FOR_INTERRUPT = """
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
(folder / f"ready-{rank}").touch()
while not (asked and len(sys.argv) == 2): time.sleep(0.02)
(folder / f"saved-{rank}").touch()
"""


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), *((number, number.name) for number in ENDING)])
def test_once_lets_every_rank_save(folder, number, name):
    with interrupts_when(lambda: len(list(folder.path.glob("ready-*"))) == 3, number=number):
        said = run(folder, WAITS_FOR_INTERRUPT)
    assert len(list(folder.path.glob("saved-*"))) == 3
    assert said == [f"finishing this step, then saving; {name} again stops at once"]


def test_once_lets_ranks_save_that_began_before_the_launcher_was_ready(folder, monkeypatch):
    """A machine that is busy: ranks work for a second before the launcher's next line."""
    made = launcher.open_store
    monkeypatch.setattr(launcher, "open_store", lambda: (time.sleep(1), made())[1])
    with interrupts_when(lambda: len(list(folder.path.glob("ready-*"))) == 3):
        run(folder, WAITS_FOR_INTERRUPT)
    assert len(list(folder.path.glob("saved-*"))) == 3


def test_an_interrupt_before_a_rank_can_take_it_is_held_back(folder):
    """As while ranks import torch: it waits for their `Interrupt`."""
    body = """
from longshift.trainer.interrupt import Interrupt
(folder / f"ready-{rank}").touch()
while signal.SIGINT not in signal.sigpending(): time.sleep(0.02)
if Interrupt()(): (folder / f"saved-{rank}").touch()
"""
    with interrupts_when(lambda: len(list(folder.path.glob("ready-*"))) == 3):
        said = run(folder, body, held=True)
    assert said == ["finishing this step, then saving; Ctrl-C again stops at once"]
    assert len(list(folder.path.glob("saved-*"))) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, *ENDING])
def test_twice_stops_at_once(folder, number):
    start = time.monotonic()
    with interrupts_when(lambda: len(list(folder.path.glob("ready-*"))) == 3, 2, number):
        handler = signal.getsignal(number)
        with pytest.raises(KeyboardInterrupt):
            run(folder, WAITS_FOR_INTERRUPT.replace("== 2", "== 3"))
        assert signal.getsignal(number) is handler
    assert time.monotonic() - start < 50
    assert not list(folder.path.glob("saved-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_under_torchrun_ranks_save_and_end(tmp_path, number):
    """SIGTERM, as a scheduler sends it to torchrun, which passes it on; SIGKILL of torchrun, which can pass nothing on."""
    (tmp_path / "text.txt").write_text(Path(json.__file__).read_text())
    train_tokenizer(iter([Path(json.__file__).read_text()]), 300).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "run.yaml").write_text(CONFIG.format(place=tmp_path, steps=5000, layout="dp2"))
    command = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    command = [sys.executable, *command, "-m", "longshift.cli", "train", str(tmp_path / "run.yaml")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as child:
        deadline = time.monotonic() + 100
        while len(read_rows(tmp_path / "run/metrics.jsonl")) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        ranks = psutil.Process(child.pid).children(recursive=True)
        child.send_signal(number)
        _, said = child.communicate(timeout=100)  # until the ranks have closed it too
    assert not psutil.wait_procs(ranks, timeout=20)[1], said
    assert (tmp_path / "run/LATEST").exists(), said
    done = read_rows(tmp_path / "run/metrics.jsonl")[-1]["step"]
    assert (tmp_path / "run/LATEST").read_text() == f"step-{done}\n", said
    why = "SIGTERM again stops at once" if number == signal.SIGTERM else "the launcher is gone, or SIGUSR2 was sent: finishing"
    assert why in said


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def cause(rank: int, kind: str, time_s: float, trace: str = "") -> Cause:
    return Cause(rank=rank, kind=kind, message=f"{kind} of {rank}", time_s=time_s, trace=trace)


@pytest.mark.parametrize(
    ("causes", "codes", "first"),
    [
        ([cause(0, "PeerError", 1.0), cause(2, "NonFiniteError", 2.0)], {0: 1, 1: -15, 2: 1}, 2),
        ([cause(0, "PeerError", 1.0)], {0: 1, 1: -9, 2: -15}, 1),
        ([cause(0, "RuntimeError", 1.0, "Traceback")], {0: 1, 1: -11}, 1),
        ([cause(0, "PeerError", 1.0), cause(1, "TypeError", 2.0, "Traceback")], {0: 1, 1: 1}, 1),
        ([cause(0, "PeerError", 1.0)], {0: 1, 1: -6, 2: -15}, 0),
        ([cause(0, "DataError", 2.0), cause(1, "DataError", 1.0)], {0: 1, 1: 1}, 1),
        ([], {0: -15, 1: -9}, 1),
        ([cause(0, "PeerError", 1.0), cause(2, "Signal", 0.0)], {0: 1, 1: -15, 2: -15}, 2),
        ([], {0: 0, 1: 3}, 1),
    ],
)
def test_the_root_cause_is_not_one_of_its_consequences(causes, codes, first):
    assert root_cause(causes, codes).rank == first


def test_an_error_keeps_its_class_and_a_fault_of_ours_its_trace(folder):
    told = write_cause(folder, 3, NonFiniteError("loss is nan"))
    assert type(as_error(told)) is NonFiniteError
    assert str(as_error(told)) == "loss is nan"
    try:
        _ = {}["key"]
    except KeyError as fault:
        ours = as_error(write_cause(folder, 1, fault))
    assert type(ours) is LongshiftError
    assert str(ours).startswith("rank 1 failed: KeyError: 'key'\nTraceback")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError("no more"), "OutOfMemoryError"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "OutOfMemoryError"),
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"), "PeerError"),
        (RuntimeError("NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'"), "OutOfMemoryError"),
        (RuntimeError("NCCL communicator was aborted on rank 1"), "PeerError"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "RuntimeError"),
        (DataError("line 1"), "DataError"),
    ],
)
def test_what_a_failure_on_a_rank_means(error, kind):
    assert type(rank_error(error, 0)).__name__ == kind


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:20671: Connection reset by peer."
            " This is typically caused by a remote worker hanging or bugs in the application. GLHF! \U0001f3d6",
            "Read error [127.0.0.1]:20671: Connection reset by peer.",
        ),
        (
            "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, remote process exited",
            "NCCL error in: remote process exited",
        ),
    ],
)
def test_a_lost_peer_is_told_without_places_in_a_backends_source(text, shown):
    assert str(rank_error(RuntimeError(text), 0)) == f"rank 0 lost its peers: {shown}"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A text and a tokenizer for it."""
    place = tmp_path_factory.mktemp("run")
    text = Path(json.__file__).read_text()
    (place / "text.txt").write_text(text)
    train_tokenizer(iter([text]), 300).save(str(place / "tokenizer.json"))
    return place


def test_python_trains_in_local_workers_and_resumes_under_another_layout(place):
    """Leaving the loop ends the run after the step in hand, saved; the next run goes on from there."""
    seen = []
    for step in ls.train(parse_config(CONFIG.format(place=place, steps=10**6, layout="dp2"))):
        seen.append(step)
        break
    done = read_rows(place / "run/metrics.jsonl")[-1]["step"]
    assert 1 <= done < 10**6
    assert (place / f"run/checkpoints/step-{done}").is_dir()
    for step in ls.train(parse_config(CONFIG.format(place=place, steps=done + 2, layout="dp1")), resume=True):
        seen.append(step)
    assert [step.step for step in seen] == [1, done + 1, done + 2]
    assert [row["step"] for row in read_rows(place / "run/metrics.jsonl")] == list(range(1, done + 3))
    assert all(0 < step.loss < 20 for step in seen)


def steps_of(world: World, config: str) -> list[dict]:
    """What the training loop says of each step."""
    parsed = parse_config(config)
    context = loop.RunContext(Path(parsed.save.dir), world, StepTrace(None, world))
    return [asdict(step) for step in loop.train_stage(next(stages_of(parsed)), context, resume=False)]


def test_a_rank_killed_in_a_switch_ends_the_run_with_one_cause_and_it_resumes_bit_exactly(worlds, tmp_path):
    """Killed at any moment of a step that switches; test_faults has a rank die between two exchanges."""
    place = tmp_path
    worlds(1).call("checkpoints:make_data", place=str(place))
    sizes = [3 + 17 * n % 60 for n in range(200)]
    text = (place / "text.txt").read_text()
    (place / "documents.jsonl").write_text("".join(json.dumps({"text": text[9 * n : 9 * n + size]}) + "\n" for n, size in enumerate(sizes)))
    groups = "[{upto: 32, use: dp2}, {upto: 64, use: tp2}]"
    config = CONFIG.format(place=place, steps=6, layout=groups).replace("text.txt", "documents.jsonl").replace("every: 1000", "every: 2")
    (place / "run.yaml").write_text(config)
    train = [sys.executable, "-m", "longshift.cli", "train", str(place / "run.yaml")]

    with subprocess.Popen(train, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout
        # Step 2 is written in the background: step 4 waits for it.
        while not child.stdout.readline().startswith("step 5/"):
            assert child.poll() is None
        workers = {p.name(): p for p in psutil.Process(child.pid).children(recursive=True) if p.name().startswith("longshift-r")}
        victim = workers["longshift-r1"]
        start = time.monotonic()
        victim.kill()
        _, err = child.communicate(timeout=100)
        assert time.monotonic() - start < 50
    assert child.returncode == PeerError.exit_code
    assert err == "longshift: rank 1 was ended by SIGKILL; the kernel does this when memory runs out (see dmesg)\n"
    assert len(workers) == 2
    assert not any(p.is_running() for p in workers.values())

    subprocess.run([*train, "--resume"], check=True, capture_output=True)
    killed = read_rows(place / "run/metrics.jsonl")
    whole, _ = worlds(2).call("test_launch:steps_of", config=config.replace(f"{place}/run", f"{place}/whole"))
    assert [(row["step"], row["loss"], row["grad_norm"]) for row in killed] == [
        (row["step"], row["loss"], row["grad_norm"]) for row in whole
    ]
    assert {group["layout"] for row in whole for group in row["groups"]} == {"dp2", "tp2"}
    switched = [group for row in whole for group in row["groups"] if group["switch_exposed_s"] > 0]
    assert all(group["layout"] == "dp2" and group["intra_node_bytes"] > 0 for group in switched)
    assert len(switched) > 3


def test_a_collective_fails_after_the_runs_own_timeout(folder):
    """Rank 1 stays away; of the world's group, and of one that is made later, rank 0 waits no longer than asked."""
    run(
        folder,
        """
import time, torch
from longshift.dist.world import World
(folder / f"ready-{rank}").touch()  # ranks have no longer than that to join each other, either: they begin together
while len(list(folder.glob("ready-*"))) < 2:
    time.sleep(0.01)
world = World.from_environment(1.5)
world.prepare([(0, 1)])
world.everyone.all_reduce(torch.ones(1))
waited = []
for group in (world.everyone, world.group((0, 1))) if rank == 0 else ():
    start = time.monotonic()
    try:
        group.all_reduce(torch.ones(1))
    except RuntimeError as late:
        waited.append(time.monotonic() - start)
if rank == 0:
    (folder / "0.json").write_text(json.dumps(waited))
while not (folder / "0.json").exists():
    time.sleep(0.05)
os._exit(0)
""",
        world=2,
    )
    waited = json.loads((folder.path / "0.json").read_text())
    assert len(waited) == 2
    assert all(seconds < 60 for seconds in waited)


def ranks_of(config: Path) -> list[int]:
    """Processes of ranks, by their names, whose launcher was given this config."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "name", "status"])
        if process.info["name"].startswith("longshift-r")
        and str(config) in (process.info["cmdline"] or [])
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.parametrize("after_s", [0.0, 0.6, 2.0])
def test_ranks_end_with_a_launcher_that_is_killed_while_they_start(tmp_path, after_s):
    """The launcher gets no chance to end them; they do not wait for each other for twenty minutes."""
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {{preset: tiny-llama}}\ndata: {{train: [{{corpus: python}}], max_len: 512, overlong: split}}\n"
                      f"train: {{tokens_per_step: 4K, steps: 1000, lr: 1e-3}}\nlayout: dp2\nsave: {{dir: {tmp_path}/run}}\n")  # fmt: skip
    command = [sys.executable, "-m", "longshift.cli", "train", str(config)]
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 100
        while len(ranks_of(config)) < 2:
            assert time.monotonic() < until
            assert launcher.poll() is None
            time.sleep(0.02)
        time.sleep(after_s)
    finally:
        launcher.kill()
        launcher.wait()
    until = time.monotonic() + 100  # a rank that trains finishes its step and saves
    while left := ranks_of(config):
        if time.monotonic() > until:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"{len(left)} ranks outlived their launcher")
        time.sleep(0.05)


WAITING = """
(folder / f"{rank}.pid").write_text(str(os.getpid()))
time.sleep(60)
"""


@contextmanager
def stopped_when_there(folder: RunFolder, rank: int, then: int | None = None) -> Iterator[None]:
    """SIGSTOP for a rank once all three are there, and another signal a second later."""

    def send() -> None:
        while len(list(folder.path.glob("*.pid"))) < 3:
            time.sleep(0.02)
        pid = int((folder.path / f"{rank}.pid").read_text())
        os.kill(pid, signal.SIGSTOP)
        if then:
            time.sleep(1.0)
            os.kill(pid, then)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    yield
    thread.join(60)


def test_a_rank_that_stands_still_is_named_and_ends_the_run(folder):
    command = [sys.executable, "-c", PRELUDE + WAITING, str(folder.path)]
    began = time.monotonic()
    with stopped_when_there(folder, 1), pytest.raises(PeerError, match=r"rank 1 \(process \d+\) has been stopped for \d+ s, and was ended"):
        launch(command, 3, folder, print, stall_timeout_s=2.0)
    assert 2.0 < time.monotonic() - began < 50.0
    pids = [int(file.read_text()) for file in folder.path.glob("*.pid")]
    assert len(pids) == 3
    assert not any(map(psutil.pid_exists, pids))


def test_a_rank_that_goes_on_in_time_is_left_alone(folder):
    body = PRELUDE + WAITING.replace("60", "4")
    with stopped_when_there(folder, 2, then=signal.SIGCONT):
        launch([sys.executable, "-c", body, str(folder.path)], 3, folder, print, stall_timeout_s=15.0)
    assert not read_causes(folder)
