"""docs/reference names every key of a config, layout word, command, option, Python name and exit code. `test_tables.py` finds a page that
is stale."""

import re
import sys
from pathlib import Path

import pytest

import longshift as ls
from longshift import cli
from longshift.config import Config
from longshift.errors import LongshiftError
from longshift.layout import layout
from longshift.layout.axes import AXES
from longshift.train_config import StageConfig

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import reference_tables  # noqa: E402
from count import leaf_keys  # noqa: E402


def page(name: str) -> str:
    return (ROOT / f"docs/reference/{name}.md").read_text()


def first_cells(text: str) -> set[str]:
    """What stands in backquotes in the first column of tables."""
    return {word for line in text.splitlines() if line.startswith("| `") for word in re.findall("`([^`]+)`", line.split(" | ")[0])}


def test_every_key_of_a_config_has_a_row():
    documented = {name.replace("[]", "") for name in first_cells(page("config"))}
    keys = set(leaf_keys(Config))
    assert len(keys) > 50
    assert keys - documented == set()
    assert {f"train.stages.{name}" for name in StageConfig.__annotations__} - documented == set()


def test_every_layout_word_has_a_row():
    documented = {re.sub(r"\d+[KMG]?(:[\d-]+)?$", "", word) for word in first_cells(page("layout"))}
    assert {*layout._NUMBERS, *layout._FLAGS, *(axis.word for axis in AXES), "chunk", "chunk-auto"} - documented == set()
    assert {"z0", "z1", "z2", "z3", "pp2:3-2"} <= first_cells(page("layout"))


def test_every_command_and_option_has_a_row():
    sections = dict(re.findall(r"^### longshift (\w+)\n(.*?)(?=^### |^<!-- end)", page("commands"), re.DOTALL | re.MULTILINE))
    shown = {name for name in cli.app if not name.startswith("-") and cli.app[name].show}
    assert set(sections) == shown
    for name, text in sections.items():
        arguments = [argument for argument in cli.app[name].assemble_argument_collection() if argument.show]
        assert len(arguments) >= 3
        assert {argument.names[0] for argument in arguments} == {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}


def test_an_option_shows_a_default_that_is_a_number():
    rows = [line for line in page("commands").splitlines() if line.startswith("| `--restarts` ")]
    assert [row.split(" | ")[1] for row in rows] == ["`3`"]
    assert rows[0] in reference_tables.commands()


def test_every_python_name_has_a_heading():
    assert set(re.findall(r"^### `(\w+)", page("python"), re.MULTILINE)) == set(ls.__all__)


def test_every_exit_code_has_a_row():
    codes = {str(error.exit_code) for error in LongshiftError.__subclasses__()} | {"0", "1", str(cli.INTERRUPTED)}
    assert codes <= first_cells(page("commands").split("## Exit codes")[1])


def test_reference_refuses_a_key_without_a_description(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Config.model_fields["layout"], "description", None)
    with pytest.raises(ValueError, match="layout has no description"):
        reference_tables.config_keys()
