"""Temporary folders: gone with their process, or at the next start of the same user."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from longshift import files
from longshift.files import publish, temporary_folder

HOLDS = """
import os, sys, time
from longshift.files import temporary_folder
with temporary_folder() as place:
    (place / "file").write_text("text")
    forked = "fork" in sys.argv and os.fork() == 0
    if not forked:
        print(place, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def holder(*words: str) -> tuple[subprocess.Popen, Path]:
    """A process in a group of its own that holds a folder, and the folder."""
    child = subprocess.Popen([sys.executable, "-c", HOLDS, *words], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout
    return child, Path(child.stdout.readline().strip())


def test_a_folder_of_a_killed_process_goes_and_that_of_a_living_one_stays(place: Path):
    (dead, left), (alive, kept) = holder(), holder()
    try:
        dead.kill()
        dead.wait()
        with temporary_folder() as own:
            assert not left.exists()
            assert (kept / "file").read_text() == "text"
        assert not own.exists()
        assert kept.exists()
    finally:
        alive.kill()
        alive.wait()
    files.sweep(place)
    assert not list(place.iterdir())


def test_a_folder_stays_while_a_forked_process_uses_it(place: Path):
    child, kept = holder("fork")
    child.kill()
    child.wait()
    files.sweep(place)
    assert kept.exists()
    os.killpg(child.pid, signal.SIGKILL)
    until = time.monotonic() + 50
    while kept.exists() and time.monotonic() < until:
        files.sweep(place)
        time.sleep(0.05)
    assert not kept.exists()


def test_what_is_not_ours_to_judge_stays(place: Path):
    """A folder without an owner's file, or of another machine, a link, a file, and a folder of another name."""
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / files.OWNER).write_text(os.uname().nodename)
    (place / "longshift-empty").mkdir()
    (place / "longshift-link").symlink_to(elsewhere)
    (place / "longshift-file").touch()
    (place / "longshift-linked").mkdir()
    (place / "longshift-linked" / files.OWNER).symlink_to(elsewhere / files.OWNER)
    (place / "longshift-far").mkdir()
    (place / "longshift-far" / files.OWNER).write_text("another-machine")
    before = sorted(place.rglob("*"))
    files.sweep(place)
    assert sorted(place.rglob("*")) == before


def test_what_a_killed_process_was_making_goes_when_the_next_makes_something_beside(tmp_path: Path):
    """As token caches, of which each may be as large as the disk."""
    code = f"""
import os, signal
from pathlib import Path
from longshift.files import publish
def fill(folder):
    (folder / "tokens").write_bytes(bytes(9))
    os.kill(os.getpid(), signal.SIGKILL)
publish(Path({str(tmp_path)!r}) / "cache", fill)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    assert [path.name.endswith(".building") for path in tmp_path.iterdir()] == [True]
    publish(tmp_path / "other", lambda folder: (folder / "file").touch())
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["file"]


@pytest.mark.parametrize(("hours", "stays"), [(0.5, True), (2, False)])
def test_an_empty_folder_goes_after_an_hour(place: Path, hours: float, stays: bool):
    """Its process was killed before it could lock the folder, or after all in it was removed."""
    left = place / "longshift-left"
    left.mkdir()
    (left / f"{files.OWNER}-new").touch()
    os.utime(left, (time.time() - 3600 * hours,) * 2)
    files.sweep(place)
    assert left.exists() is stays


@pytest.mark.parametrize("how", ["train", "api"])
def test_the_next_start_of_a_run_removes_what_a_killed_one_left(place: Path, how: str):
    """Before it does anything else: the config is of a run that is refused for its data."""
    dead, left = holder()
    dead.kill()
    dead.wait()
    config = place / "run.yaml"
    config.write_text(
        f"model: {{preset: tiny-llama}}\ndata: {{train: [{{path: {place}/none.txt}}], max_len: 64}}\n"
        f"train: {{tokens_per_step: 128, steps: 1, lr: 1e-3}}\nsave: {{dir: {place}/run}}\n"
    )
    code = f"import longshift; list(longshift.train({str(config)!r}))"
    command = ["-c", code] if how == "api" else ["-m", "longshift.cli", "train", str(config)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert "none.txt" in done.stderr
    assert not left.exists()
