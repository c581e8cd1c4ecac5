"""What `make test` leaves out loses no known mistake, and nothing dear is in it without a reason."""

import csv
from collections import defaultdict

import pytest
from case_survey import COLLECTED
from mutant_run import CASES, known_kills, targets

DEAREST_S, DEAR_S = 10.0, 3.0  # processor seconds


@pytest.fixture
def chosen() -> dict[str, dict]:
    with CASES.open(newline="") as file:
        return {row["case"]: row for row in csv.DictReader(file) if row["chosen_for"]}


@pytest.mark.parametrize("name", [target.name for target in targets()])
def test_a_mutant_has_a_case_in_the_choice(pytestconfig: pytest.Config, name: str):
    """`make test-mutants` runs it. A case that was renamed or removed kills nothing."""
    cases = known_kills().get(name, [])
    assert cases
    collected = pytestconfig.stash[COLLECTED]
    files = {case.split("::")[0] for case in collected}
    assert any(case in collected or case.split("::")[0] not in files for case in cases)


def test_a_mistake_that_a_case_makes_itself_is_in_the_choice(pytestconfig: pytest.Config):
    """Of the cases with a parameter `mutant`, one for each of its values."""
    is_chosen = defaultdict(bool)
    for in_choice, mutant in pytestconfig.stash[COLLECTED].values():
        if mutant:
            is_chosen[mutant] |= in_choice
    assert not [mutant for mutant, found in is_chosen.items() if not found]


def test_dear_cases_have_a_reason(chosen: dict[str, dict]):
    seconds = {case: float(row["processor_s"]) for case, row in chosen.items()}
    assert max(seconds.values()) <= DEAREST_S
    dear = [case for case, value in seconds.items() if value > DEAR_S]
    assert not [case for case in dear if chosen[case]["chosen_for"].endswith(("cheap", " lines"))]
