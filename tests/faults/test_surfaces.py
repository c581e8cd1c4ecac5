"""Half a minute of damaged input, the same every time; `make test-faults` plays more. And that the judge sees each kind of failure."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fuzz import Surface, apart, play

from longshift.errors import UsageError


def tell(text: str) -> None:
    raise UsageError(text)


@pytest.mark.parametrize(
    ("act", "verdict"),
    [
        (lambda: None, "accepted"),
        (lambda: tell("run.yaml:3: no such key"), "refused"),
        (lambda: tell("something is wrong"), "unlocated"),
        (lambda: tell("run.yaml: " + "x" * 30_000), "unlocated"),
        (lambda: [][1], "traceback"),
        (lambda: sys.exit(0), "traceback"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "death"),
        (lambda: os._exit(77), "death"),
        (lambda: time.sleep(60), "hang"),
    ],
    ids=["good", "located", "nowhere", "endless", "traceback", "exit", "signal", "code", "hang"],
)
def test_the_judge_tells_failures_apart(act, verdict):
    assert apart(act, ("run.yaml",), 20.0 if verdict != "hang" else 0.3)[0] == verdict


def test_cases_are_the_same_every_time():
    def read(folder: Path, spoiled: float) -> None:
        tell(f"{spoiled} {sorted(path.name for path in folder.iterdir())}")

    surface = Surface("x", lambda folder: (folder / "a").touch(), lambda r, _: r.random(), read, ("a",))
    assert play(surface, range(5)) == play(surface, range(5))
    assert len({case.said for case in play(surface, range(5))}) == 5


def test_damaged_input_is_read_or_refused_where_it_is(tmp_path):
    command = [
        sys.executable,
        str(Path(__file__).with_name("fuzz.py")),
        "--cases",
        "60",
        "--seconds",
        "4",
        "--json",
        str(tmp_path / "out.json"),
    ]
    played = subprocess.run(command, capture_output=True, text=True, check=False)  # in a process that has no threads yet
    assert not played.returncode, played.stdout + played.stderr
    surfaces = json.loads((tmp_path / "out.json").read_text())["surfaces"]
    assert set(surfaces) == {"config", "overrides", "model", "tokenizer", "dataset", "jsonl", "parquet"}
    assert all(counts["refused"] for counts in surfaces.values()), surfaces
