"""What the survey measures and how it chooses, on made-up cases."""

import subprocess
import sys

import numpy as np
import pytest
from case_survey import case_name, processor_seconds
from choose_cases import Choice

BURN = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\ninput()"


def test_processor_seconds_are_those_of_children_too_while_they_live_and_when_they_have_ended():
    begin_s = processor_seconds()
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout
        child.stdout.readline()
        alive_s = processor_seconds() - begin_s
        child.communicate(b"\n")
    assert alive_s > 0.35
    assert processor_seconds() - begin_s > 0.35


@pytest.mark.parametrize("name", ["a.py::b", "a.py::b[x@y]", "a.py::b[x]"])
def test_a_name_is_without_its_group(name: str):
    assert case_name(f"{name}@a ranks") == case_name(name) == name


def choice_of(**seconds: float) -> Choice:
    """Of cases with these seconds. `dear` kills both mutants and runs lines 0 to 5, `first` and `second` one each, `lines` lines 0 to 8."""
    kills = {"dear": ["one", "two"], "first": ["one"], "second": ["two"], "lines": []}
    ran = {"dear": range(6), "first": range(2), "second": range(2, 4), "lines": range(9)}
    rows = {name: {"case": name, "outcome": "passed", "cpu_s": value, "kills": kills[name]} for name, value in seconds.items()}
    return Choice(rows, {name: np.isin(np.arange(10), ran[name]) for name in rows})


def test_the_cheapest_cases_that_reach_everything_are_chosen():
    choice = choice_of(dear=5.0, first=1.0, second=1.0)
    choice.add_needed({"mutant one", "mutant two"})
    assert choice.reasons == {"first": "mutant one", "second": "mutant two"}


def test_a_case_that_others_make_superfluous_is_left_out():
    """`first` comes first, since it reaches most for a second; then `dear`, which reaches what it does, too."""
    choice = choice_of(dear=2.0, first=0.5, second=9.0)
    choice.add_needed({"mutant one", "mutant two"})
    assert choice.reasons == {"dear": "mutant one; mutant two"}


def test_lines_are_added_until_few_are_missing():
    choice = choice_of(first=1.0, lines=2.0)
    choice.add_needed({"mutant one"})
    choice.add_lines(np.arange(10) < 9, limit=7, dearest_s=3.0)
    assert choice.reasons == {"first": "mutant one"}
    choice.add_lines(np.arange(10) < 9, limit=0, dearest_s=3.0)
    assert choice.reasons["lines"] == "7 lines"
