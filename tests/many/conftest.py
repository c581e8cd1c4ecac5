"""Worlds of forked ranks for the whole session, and references to compare with.

A fork keeps neither threads nor autograd's state, so whoever uses `worlds` runs before the tests that start threads or run a backward
pass in this process (`tests/conftest.py`).
"""

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from unittest.mock import patch

import pytest
from forked import DEADLINE_S, RenewedWorld, Report, Truth, Worlds
from trial import Trial

from longshift.dist.fork import ForkedWorld


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """worlds(size): ranks that stay for many calls."""
    made: dict[int, ForkedWorld] = {}

    def world(size: int) -> ForkedWorld:
        return made.setdefault(size, RenewedWorld(size))

    yield world
    for world_ in made.values():
        world_.close()


@pytest.fixture(scope="session")
def truth(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """truth(trial): the file of its one-process reference, made once, and checked to be worth comparing with."""
    folder, made = tmp_path_factory.mktemp("truth"), {}

    def path(trial: Trial) -> str:
        if trial not in made:
            made[trial] = str(folder / f"{len(made)}.safetensors")
            arguments = {"trial": trial.to_json(), "path": made[trial]}
            worlds(1).call("trial:write_reference", DEADLINE_S, **arguments)
            (sizes,) = worlds(1).call("parity:sizes", DEADLINE_S, **arguments)
            assert sizes["loss"] > 1, sizes
            assert sizes["grad"] > 1e-4, sizes
            assert sizes["weight"] > (5e-5 if trial.rule.name == "sgd" else 1e-3), sizes  # SGD moves weights as far as gradients reach
            assert sizes["optimizer"] > 1e-5, sizes
        return made[trial]

    return path


@pytest.fixture(scope="session")
def report_of(worlds: Worlds) -> Report:  # `worlds`, so that it runs while this process may fork
    """report_of(benchmark, *arguments): what a benchmark prints as JSON, run in this process."""

    def run(benchmark: str, *arguments: str) -> dict:
        printed = StringIO()
        with patch.object(sys, "argv", [f"{benchmark}.py", "--json", *arguments]), redirect_stdout(printed):
            assert not importlib.import_module(benchmark).main()
        return json.loads(printed.getvalue())

    return run
