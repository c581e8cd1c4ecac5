"""What is installed: the wheel has the package and its types, and trains from another folder, without the source tree."""

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCE = REPOSITORY / "src"


def run(*command: str | Path, cwd: Path, **more: str) -> str:
    """What a command prints, in an environment that knows neither the source tree nor another virtual environment."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=inherited | more, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built as `pip install .` builds it; hatchling is fetched where it is not installed."""
    place = tmp_path_factory.mktemp("wheel")
    here = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *here, "--wheel-dir", place, REPOSITORY, cwd=place)
    (found,) = place.glob("longshift-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The programs of a fresh environment that has the wheel, and sees what else the tests' own environment has."""
    place = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", place, cwd=place)
    python = place / "bin/python"
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place).strip())
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=place)
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return place / "bin"


def test_the_wheel_has_the_package_its_types_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"longshift/py.typed", "longshift/cli.py", "longshift/cluster/presets/h100.json"} <= set(names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"longshift"}
    sources = {str(path.relative_to(SOURCE)) for path in (SOURCE / "longshift").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources


def test_the_wheel_trains_from_another_folder(installed, tmp_path):
    assert run(installed / "longshift", "--version", cwd=tmp_path) == "0.1.0\n"
    where = run(installed / "python", "-c", "import longshift; print(longshift.__file__)", cwd=tmp_path)
    assert where.startswith(str(installed.parent))
    said = run(
        *(installed / "longshift", "train", REPOSITORY / "examples/quickstart.yaml"),
        *("train.steps=2", "train.warmup=1", "save.dir=run"),
        cwd=tmp_path,
        OMP_NUM_THREADS="1",
    )
    assert re.search(r"^step 2/2 .*\nrun     run: finished at step 2 of 2", said, re.MULTILINE), said
    assert (tmp_path / "run/LATEST").read_text() == "step-2\n"


def test_the_quickstart_installs_the_product_alone_and_the_tests_the_rest():
    def recipes(target: str) -> list[str]:
        lines = run("make", "--no-print-directory", "-n", "-B", target, cwd=REPOSITORY).splitlines()
        return [line for line in lines if "pip install" in line]

    (product,) = recipes("quickstart")
    assert product.endswith("--editable .")
    assert [line.split("--editable ")[1] for line in recipes("test")] == ["'.[dev]'"]


@pytest.mark.parametrize("there", [False, True])
def test_the_quickstart_says_how_the_command_is_used_where_it_is_not_on_the_path(tmp_path, there):
    lines = run("make", "--no-print-directory", "-n", "quickstart", cwd=REPOSITORY).splitlines()
    (first,) = (number for number, line in enumerate(lines) if "train examples/quickstart.yaml" in line)
    if there:
        (tmp_path / "longshift").write_text("#!/bin/sh\n")
        (tmp_path / "longshift").chmod(0o755)
    said = run("bash", "-c", "\n".join(lines[first + 1 :]), cwd=REPOSITORY, PATH=f"{tmp_path}:/usr/bin:/bin")
    assert said == ("" if there else "shell   source .venv/bin/activate   # then longshift is a command here\n")
