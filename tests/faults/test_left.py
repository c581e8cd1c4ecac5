"""What killed processes leave in a run folder, and runs whose disk kept less than they wrote."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from longshift.config_file import parse_config
from longshift.errors import CheckpointError, LongshiftError, OutOfMemoryError, UsageError
from longshift.files import refused, rewrite, written
from longshift.print_result import print_result
from longshift.trainer import run_folder
from longshift.trainer.run_folder import RunFolder, prepare, summarize_run

CONFIG = """
model: {{preset: tiny-llama}}
data: {{train: [{{corpus: python}}], max_len: 64}}
train: {{tokens_per_step: 128, steps: 4, lr: 1e-3}}
save: {{dir: {place}/run}}
"""


@pytest.fixture
def config(tmp_path: Path):
    return parse_config(CONFIG.format(place=tmp_path))


def test_what_writers_left_goes_and_what_is_a_persons_stays(config, tmp_path):
    run = tmp_path / "run"
    left = (
        ".probe-1",
        ".env.json-23",
        "..config.yaml-4",
        ".metrics.jsonl-5",
        ".plan.json-6",
        ".LATEST.writing",
        ".BEST.writing",
        ".identity.writing",
    )
    own = (".gitignore", ".notes-2024", "probe-1", ".env", "checkpoints/note")
    (run / "checkpoints/.step-3.writing").mkdir(parents=True)
    (run / "checkpoints/step-2").mkdir()
    for name in (*left, *own, "checkpoints/.step-3.writing/rank-00000.safetensors"):
        (run / name).touch()
    prepare(config, resume=False)
    assert not [name for name in (*left, "checkpoints/.step-3.writing") if (run / name).exists()]
    assert all((run / name).exists() for name in (*own, "checkpoints/step-2"))


def test_among_other_ranks_nothing_is_swept(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.env.json-23").touch()
    prepare(config, resume=False, alone=False)
    assert (tmp_path / "run/.env.json-23").exists()


@pytest.mark.parametrize("seconds", [0.7, 60])
def test_a_start_waits_for_ranks_of_a_killed_launcher(config, tmp_path, monkeypatch, seconds):
    monkeypatch.setattr(run_folder, "RANKS_S", 50.0 if seconds < 5 else 0.3)
    (tmp_path / "run").mkdir()
    code = (
        "import sys, time; from pathlib import Path; from longshift.trainer.run_folder import RunFolder\n"
        f"kept = RunFolder(Path({str(tmp_path / 'run')!r})).joined(); print('there', flush=True); time.sleep({seconds})"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout
        assert rank.stdout.readline() == "there\n"
        if seconds < 5:
            prepare(config, resume=False)
            assert rank.wait(30) == 0
        else:
            with pytest.raises(UsageError, match=r"ranks of a launcher that is gone still save in .*run"):
                prepare(config, resume=False)
        rank.kill()


def test_ranks_share_their_lock(tmp_path):
    folder = RunFolder(tmp_path)
    first, second = folder.joined(), folder.joined()
    with open(tmp_path / ".ranks") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for file in (first, second):
        assert file is not None
        file.close()


@pytest.mark.parametrize(("rows", "saved", "finished"), [(3, 4, True), (4, 2, True), (3, 2, False), (0, 4, True)])
def test_a_run_whose_last_row_is_lost_is_finished(config, tmp_path, capsys, rows, saved, finished):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.metrics.write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1, rows + 1)))
    folder.latest.write_text(f"step-{saved}\n")
    summary = summarize_run(config, folder)
    print_result(summary, as_json=False)
    assert summary.finished is finished
    assert f"{'finished' if finished else 'stopped'} at step {max(rows, saved)} of 4" in capsys.readouterr().out


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_what_a_disk_refuses_is_named(number):
    why = os.strerror(number)
    with pytest.raises(LongshiftError, match=f"^run/metrics.jsonl cannot be written: {why}") as caught, written("run/metrics.jsonl"):
        raise OSError(number, why)
    assert type(caught.value) is (CheckpointError if number == errno.EROFS else OutOfMemoryError)
    assert str(refused(OSError(number, why, "x/y"))).startswith("x/y cannot be written: ")


def test_a_file_that_cannot_be_written_leaves_the_old_one_alone(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(UnicodeEncodeError):
        rewrite(tmp_path / "file", "\udc80")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        rewrite(tmp_path / "folder", "new")
    assert (tmp_path / "file").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
