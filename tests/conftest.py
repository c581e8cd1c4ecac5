"""In which order cases run, which of them share a worker, and which are long.

A case is long if the survey knows it and has not chosen it for `make test` (`survey/choose_cases.py`). A case that the
survey does not know yet is run by `make test`, so that a new test counts at once.
"""

import csv
from pathlib import Path

import pytest
from case_survey import COLLECTED, mutant_of, pytest_addoption, pytest_configure  # noqa: F401  (hooks of the plugin)

CASES = Path(__file__).parent / "survey" / "cases.csv"


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    with CASES.open(newline="") as file:
        long = {row["case"] for row in csv.DictReader(file) if not row["chosen_for"]}
    config.stash[COLLECTED] = {item.nodeid: (item.nodeid not in long, mutant_of(item)) for item in items}
    for item in items:
        if item.nodeid in long:
            item.add_marker(pytest.mark.long)
        # A file's cases are on one worker, where they share fixtures. Those that fork ranks come before all others.
        item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}{' ranks' if forks(item) else ''}"))
    items.sort(key=lambda item: not forks(item))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where cases of a file are spread over processes, each makes the fixtures again and ranks fill the memory."""
    if getattr(session.config.option, "loadgroup", False) and session.items and "@" not in session.items[0].nodeid:
        raise pytest.UsageError("this pytest-xdist does not see the groups of cases: pip install the versions of pyproject.toml")


def forks(item: pytest.Item) -> bool:
    return "worlds" in getattr(item, "fixturenames", ())
