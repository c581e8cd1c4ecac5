"""Processes of ranks: forked from a seed, or started by a command. The ranks here need no torch."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from longshift.dist.ranks import RankProcesses, Ranks, Seed

WORK = {
    "leaves": 'print(os.environ["RANK"]); sys.exit(int(os.environ["RANK"]))',
    "waits": "time.sleep(60)",
    "ignores": "signal.signal(signal.SIGTERM, signal.SIG_IGN); open(sys.argv[1] + os.environ['RANK'], 'x').close(); time.sleep(60)",
    "blocked": "sys.exit(10 + (signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])))",
    "handles": "sys.exit([signal.getsignal(n) for n in (15, 2)] != [signal.SIG_DFL, signal.default_int_handler])",
    "starts": "import subprocess; subprocess.Popen(['sleep', '60']); time.sleep(60)",
}


def work(words: Sequence[str]) -> None:
    sys.argv[1:] = words[1:]
    exec(WORK[words[0]], {"os": os, "sys": sys, "time": time, "signal": signal})


@pytest.fixture(params=["seed", "command"])
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., Ranks]]:
    """Starts three ranks, or as many as are named, that do what WORK says under a name."""
    seeds, begun = [], []

    def begin(name: str, *words: str, held: bool = False, size: int = 3) -> Ranks:
        environments = [{"RANK": str(rank)} for rank in range(size)]
        if request.param == "seed":
            seeds.append(Seed(lambda: None, work))
            begun.append(seeds[-1].start([name, *words], environments, held))
        else:
            command = [sys.executable, "-c", f"import os, sys, time, signal\n{WORK[name]}", *words]
            begun.append(RankProcesses(command, environments, held))
        return begun[-1]

    yield begin
    for ranks in begun:
        ranks.end()
    for seed in seeds:
        seed.close()


def all_ended(ranks: Ranks, size: int = 3) -> dict[int, int]:
    until = time.monotonic() + 120
    while len(ranks.codes()) < size and time.monotonic() < until:
        ranks.wait(1.0)
    return ranks.codes()


def test_each_has_its_place_and_its_code(start, capfd):
    assert all_ended(start("leaves")) == {0: 0, 1: 1, 2: 2}
    assert sorted(capfd.readouterr().out.split()) == ["0", "1", "2"]


def test_ends_are_told_as_they_come(start):
    ranks = start("waits")
    assert len(ranks.pids) == 3
    assert all(psutil.pid_exists(pid) for pid in ranks.pids.values())
    ranks.wait(0.1)
    assert ranks.codes() == {}
    os.kill(ranks.pids[1], signal.SIGKILL)
    began = time.monotonic()
    ranks.wait(100.0)
    assert time.monotonic() - began < 50.0
    assert ranks.codes() == {1: -signal.SIGKILL}
    ranks.end()
    assert ranks.codes() == {0: -signal.SIGTERM, 1: -signal.SIGKILL, 2: -signal.SIGTERM}


def test_one_that_ignores_an_end_is_killed(start, tmp_path, monkeypatch):
    monkeypatch.setattr("longshift.dist.ranks.ENDING_S", 0.5)
    ranks = start("ignores", f"{tmp_path}/")
    while len(list(tmp_path.iterdir())) < 3:
        time.sleep(0.02)
    ranks.end()
    assert set(ranks.codes().values()) == {-signal.SIGKILL}


@pytest.mark.parametrize("held", [True, False])
def test_an_interrupt_is_held_back_where_asked(start, held):
    assert set(all_ended(start("blocked", held=held)).values()) == {10 + held}
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_signals_do_what_they_do_in_any_process(start):
    """Also where this process has been started by a shell that ignores SIGINT, in the background."""
    own = {signal.SIGTERM: lambda *_: None, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    try:
        assert set(all_ended(start("handles")).values()) == {0}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_what_a_rank_has_started_ends_with_it(start):
    ranks = start("starts", size=1)
    until = time.monotonic() + 20
    while not (children := psutil.Process(ranks.pids[0]).children()) and time.monotonic() < until:
        time.sleep(0.02)
    ranks.end()
    assert [child.wait(50) for child in children] in ([None], [-signal.SIGTERM])


def test_ranks_end_with_their_seed():
    with Seed(lambda: None, work) as seed:
        ranks = seed.start(["waits"], [{"RANK": "0"}, {"RANK": "1"}], held=False)
        processes = [psutil.Process(pid) for pid in ranks.pids.values()]
        assert {process.ppid() for process in processes} == {seed.pid}
        os.kill(seed.pid, signal.SIGKILL)
        assert all_ended(ranks, 2) == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
        psutil.wait_procs(processes, 5)
        assert not any(process.is_running() for process in processes)


def test_a_seed_that_is_not_used_ends():
    seed = Seed(lambda: time.sleep(60), work)
    process = psutil.Process(seed.pid)
    seed.close()
    seed.close()
    assert not process.is_running()


def test_a_seed_that_cannot_import_has_no_ranks(capfd):
    with Seed(lambda: json.loads("{"), work) as seed:
        ranks = seed.start(["waits"], [{"RANK": "0"}], held=False)
        assert all_ended(ranks, 1) == {0: -signal.SIGKILL}
    assert "JSONDecodeError" in capfd.readouterr().err


def test_a_seed_and_its_ranks_end_with_the_launcher(tmp_path: Path):
    """Which is killed, and closes nothing."""
    code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_ranks import Seed, work
seed = Seed(lambda: None, work)
ranks = seed.start(["waits"], [{{"RANK": "0"}}, {{"RANK": "1"}}], held=True)
print(seed.pid, *ranks.pids.values(), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout
        processes = [psutil.Process(int(pid)) for pid in launcher.stdout.readline().split()]
        assert len(processes) == 3
        launcher.kill()
    psutil.wait_procs(processes, 5)
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
