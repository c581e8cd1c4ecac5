"""Files that a repository is expected to have are true: links lead somewhere, versions agree, CI runs what `.ci/run` runs."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.parametrize("page", sorted(path.name for path in ROOT.glob("*.md")))
def test_links_of_pages_outside_docs_lead_somewhere(page: str):
    """mkdocs checks those inside docs."""
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_versions_agree():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == VERSION
    assert f"## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_workflow_runs_what_must_pass_before_a_merge():
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]


def test_hooks_are_those_of_make_lint():
    hooks = [hook["entry"] for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"] for hook in repo["hooks"]]
    assert hooks == [".venv/bin/ruff check --fix", ".venv/bin/ruff format"]


def test_what_architecture_names_is_where_it_says():
    """`Name.method` (`room/file.py`): the file defines the last part of the name."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = re.findall(r"`([\w.]+)`[^`(|]*\(`(\w+/\w+\.py)`\)", text)
    assert len(named) > 15
    for name, file in named:
        source = (ROOT / "src" / "longshift" / file).read_text()
        assert re.search(rf"^ *(def|class) {name.rpartition('.')[2]}\b", source, re.MULTILINE), (name, file)
