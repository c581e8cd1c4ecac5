"""A launcher that is killed, or stopped by Ctrl-C, while it starts: nothing is left of it. `make test-faults` tries fifty moments."""

import random
import signal
import subprocess
from collections import Counter
from pathlib import Path

import figures
import pytest
from orphans import MARK, Ended, frozen, launched, processes, wrong

MOMENTS_S = 4.0


@pytest.mark.parametrize(("after_s", "number"), [(0.5, 9), (2.0, 9), (3.0, 9), (4.0, 9), (4.5, 2)])
def test_nothing_is_left_of_a_launcher(place: Path, after_s: float, number: int):
    found = launched(place, f"{number}-{after_s}", after_s, number)
    assert not wrong(found, number), wrong(found, number)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_frozen_while_it_trains_is_named(place: Path, rank: int):
    """All are gone soon after `train.stall_timeout` seconds, not after the ten minutes of a collective."""
    found, pid = frozen(place, rank, 3.0)
    assert not found.left
    assert found.code == 6
    assert found.seconds < 50.0
    last = found.err.splitlines()[-1]
    assert last.startswith(f"longshift: rank {rank} (process {pid}) has been stopped for 3 s, and was ended")


@pytest.mark.campaign
def test_the_campaign(place: Path):
    """Moments spread over the start, those after ranks have begun to train among them, three in ten of them Ctrl-C."""
    random_, ends, bad, slowest, lefts = random.Random(0), Counter(), [], 0.0, []
    for case in range(50):
        after_s = (case + random_.random()) * MOMENTS_S / 50 * (1 if case % 2 else 2)
        number = signal.SIGINT if case % 10 in (2, 5, 8) else signal.SIGKILL
        found = launched(place, f"campaign-{case}", after_s, number)
        ends[f"{number.name}, {found.ranks} ranks"] += 1
        lefts.append(found.left)
        slowest = max(slowest, found.seconds if number == signal.SIGKILL else 0.0)
        if why := wrong(found, number):
            bad.append([after_s, number.name, why])
    counts = {"cases": 50, "orphans": sum(len(left) for left in lefts), "tracebacks": sum("traceback" in why for *_, why in bad)}
    figures.keep("launchers", counts, {"ends": dict(ends), "slowest_s": slowest, "failures": bad})
    assert not bad, bad[:3]
    assert any(not name.endswith(" 0 ranks") for name in ends)


def test_the_campaign_can_fail():
    assert wrong(Ended(-9, 2, 5.0, ("1: worker",), ""), signal.SIGKILL)
    assert wrong(Ended(1, 2, 1.0, (), "Traceback"), signal.SIGINT)
    assert wrong(Ended(1, 2, 1.0, (), ""), signal.SIGINT)
    assert not wrong(Ended(130, 2, 1.0, (), "longshift: stopped"), signal.SIGINT)


def test_processes_are_found_by_their_mark(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(MARK, "a-mark-of-this-test")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin
        assert child.stdout
        child.stdin.write(b"begun\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"begun\n"  # a process that is being started has no environment for a moment
        assert [process.pid for process in processes("a-mark-of-this-test")] == [child.pid]
        child.kill()
