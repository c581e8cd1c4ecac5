"""A run and its export read nothing outside the folders that the config names, listen on loopback only, and unpickle nothing."""

import json
from pathlib import Path

import pytest
from reach import reached, strace

from longshift.documents.tokenizer import train as train_tokenizer

CONFIG = """
model: {{preset: tiny-llama}}
data: {{train: [{{path: {named}/text.txt}}], tokenizer: {named}/tokenizer.json, max_len: 64, overlong: split, cache: {named}/cache}}
train: {{tokens_per_step: 128, steps: 2, lr: 1e-3}}
layout: dp2.z3
save: {{dir: {named}/run}}
"""
NAMED = ("named", "cwd", "tmp", "home/.cache/longshift")  # the last: what is known of the machine


@pytest.fixture
def place(tmp_path: Path) -> Path:
    named = tmp_path / "named"
    named.mkdir()
    text = Path(json.__file__).read_text()
    (named / "text.txt").write_text(text)
    train_tokenizer(iter([text]), 300).save(str(named / "tokenizer.json"))
    (named / "run.yaml").write_text(CONFIG.format(named=named))
    (tmp_path / "elsewhere").write_text("secret")
    return tmp_path


def test_a_run_and_its_export_reach_what_they_are_given(place: Path):
    named = [place / name for name in NAMED]
    cli = ["-m", "longshift.cli"]
    found = reached([*cli, "train", str(place / "named/run.yaml")], place)
    assert not found.wrong(named), found.wrong(named)
    assert str(place / "named/text.txt") in found.read
    assert "127.0.0.1" in found.bound
    export = reached([*cli, "export", str(place / "named/run"), "--to", str(place / "named/export")], place)
    assert not export.wrong(named), export.wrong(named)
    if strace():  # tensors are read by a native library
        assert str(place / "named/run/checkpoints/step-2/rank-00000.safetensors") in export.read


@pytest.mark.parametrize(
    ("mistake", "word"),
    [
        ("open('{place}/elsewhere').read()", "read {place}/elsewhere"),
        ("import socket; socket.create_server(('', 0))", "bound 0.0.0.0"),
        ("import pickle, fractions; pickle.loads(pickle.dumps(fractions.Fraction(1)))", "unpickled "),
        (
            "import subprocess, sys; subprocess.run([sys.executable, '-c', 'open(\"{place}/elsewhere\")'], check=True)",
            "read {place}/elsewhere",
        ),
        ("import ctypes; ctypes.CDLL(None).open(b'{place}/elsewhere', 0)", "read {place}/elsewhere"),
    ],
)
def test_a_command_that_reaches_further_is_noticed(place: Path, mistake: str, word: str):
    """Also where a process of its own does, and, with `strace`, a native library."""
    if "ctypes" in mistake and not strace():
        pytest.skip("needs strace")
    code = mistake.format(place=place) + "; import sys; sys.argv = ['longshift', '--version']; from longshift.cli import main; main()"
    found = reached(["-c", code], place).wrong([place / name for name in NAMED])
    assert [line for line in found if line.startswith(word.format(place=place))], found
