"""Nothing that a file holds ends in a traceback, a hang, a death, or an error that does not say where. `make test-faults` plays many more
cases and writes what became of them."""

import os
import random
import signal
import time
from pathlib import Path

import figures
import fuzz
import pytest
import spoiled_runs
import surfaces
from fuzz import Case, Silent, played, summary
from surfaces import SURFACES

from longshift.errors import DataError
from longshift.state import manifest

# Cases of each surface: as many seconds of each here, and in the campaign.
QUICK = {"config": 120, "overrides": 120, "model folder": 120, "tokenizer": 40, "json lines": 120, "parquet": 80, "dataset": 24}
QUICK |= {"weight index": 60, "checkpoint": 150, "tables": 120, "record fields": 60, "templates": 40, "diaries": 150}
CAMPAIGN = {"config": 2500, "overrides": 2500, "model folder": 1200, "tokenizer": 400, "json lines": 8000, "parquet": 2000, "dataset": 400}
CAMPAIGN |= {"weight index": 1000, "checkpoint": 4000, "tables": 2500, "record fields": 1500, "templates": 400, "diaries": 4000}


@pytest.fixture(scope="session", autouse=True)
def _made() -> None:
    surfaces.make()


@pytest.mark.parametrize("name", SURFACES)
def test_a_surface_holds(name: str):
    case, words = SURFACES[name]
    found = fuzz.fuzz(case, QUICK[name], words=words)
    assert not found.bad, found.bad[:3]
    assert found.counts["refused"] > 0
    assert found.counts["accepted"] > 0


@pytest.mark.campaign
def test_the_campaign():
    """`JSON=out.json` keeps the figures."""
    found = {name: fuzz.fuzz(case, CAMPAIGN[name], seed=10_000, words=words) for name, (case, words) in SURFACES.items()}
    failures = [[name, *bad] for name, verdicts in found.items() for bad in verdicts.bad]
    counts = {name: dict(verdicts.counts) for name, verdicts in found.items()}
    figures.keep("surfaces", summary(found), {"surfaces": counts, "failures": failures})
    assert not failures, failures[:5]


class _Any:
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def test_a_reader_that_believes_any_seal_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manifest, "sealed", lambda run, body: _Any())
    assert fuzz.fuzz(spoiled_runs.case, 60).counts["silent"] > 0


def _raises(error: BaseException) -> Case:
    def case(random_: random.Random, place: Path) -> None:
        raise error

    return case


@pytest.mark.parametrize(
    ("case", "verdict"),
    [
        (lambda random_, place: None, "accepted"),
        (lambda random_, place: (_ for _ in ()).throw(DataError(f"{place}/a.jsonl, line 1: bad")), "refused"),
        (_raises(DataError("something is wrong")), "unlocated"),
        (_raises(ValueError("x")), "traceback"),
        (_raises(Silent("x")), "silent"),
        (_raises(RecursionError()), "traceback"),
        (lambda random_, place: os.kill(os.getpid(), signal.SIGSEGV), "death"),
        (lambda random_, place: os._exit(0), "death"),
        (lambda random_, place: time.sleep(60), "hang"),
        (lambda random_, place: bytearray(64 << 30), "traceback"),
    ],
)
def test_the_fuzzer_can_fail(case: Case, verdict: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fuzz, "DEADLINE_S", 2.0 if verdict == "hang" else 20.0)
    assert played(case, 0)[0] == verdict
