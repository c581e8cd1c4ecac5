"""The wheel: what a person installs has all that training needs, and its types."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

from longshift.documents.tokenizer import train as train_tokenizer

ROOT = Path(__file__).parents[2]
RUN = """
model: {preset: tiny-llama}
data: {train: [{path: a.txt}], tokenizer: tokenizer.json, max_len: 128, overlong: split, cache: cache}
train: {tokens_per_step: 256, steps: 2, lr: 1e-3, precision: float32}
save: {dir: run, every: 2}
"""


def test_a_wheel_trains_where_the_source_is_not(tmp_path: Path):
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--disable-pip-version-check", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = tmp_path.glob("longshift-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "longshift/py.typed" in names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "docs"))]
    place = tmp_path / "clean"
    venv.create(place / "venv", with_pip=False)
    (site,) = (place / "venv" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:  # a wheel of plain Python is installed by being unpacked
        archive.extractall(site)
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # dependencies, but not what is installed to be edited
    python = place / "venv" / "bin" / "python"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL"))}
    (place / "run.yaml").write_text(RUN)
    (place / "a.txt").write_text(text := Path(venv.__file__).read_text())
    train_tokenizer(iter([text]), 300).save(str(place / "tokenizer.json"))

    def run(*words: str) -> str:
        done = subprocess.run([str(python), *words], cwd=place, env=clean, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-c", "import longshift; print(longshift.__file__)").strip() == str(site / "longshift" / "__init__.py")
    assert run("-m", "longshift.cli", "--version").strip() == wheel.name.split("-")[1]
    run("-m", "longshift.cli", "train", "run.yaml")
    assert (place / "run" / "checkpoints" / "step-2" / "manifest.json").is_file()
