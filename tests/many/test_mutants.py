"""The power of the parity tests: the same comparison that every layout passes must fail, clearly, with each known mistake built in.

Each mistake is made under one layout; under others in tests that are marked `long`.
"""

from collections.abc import Callable

import pytest
from forked import DEADLINE_S, Truth, Worlds
from mutants import CASES, Case
from parity import EDGES, LIMIT, largest, trial_of

from longshift.layout.layout import Layout

Compare = Callable[[Case, str, str | None], float]


@pytest.fixture(scope="module")
def worst(worlds: Worlds, truth: Truth) -> Compare:
    """worst(case, layout, mutant): the largest of the four differences; without a mutant kept for the next case."""
    clean: dict[tuple[str, str, int], float] = {}

    def compare(case: Case, layout: str, mutant: str | None) -> float:
        key = (case.family, layout, case.steps)
        if mutant is None and key in clean:
            return clean[key]
        path = truth(trial_of(case.family, case.steps))
        trial = trial_of(case.family, case.steps, edges=EDGES)
        first = Layout.parse(layout.split(" > ")[0])
        arguments = {"trial": trial.to_json(), "layout": layout, "path": path, "per_node": 2} | ({"mutant": mutant} if mutant else {})
        function = "mutants:compare_mutant" if mutant else "trial:compare"
        found = worlds(first.world).call(function, DEADLINE_S, **arguments)
        difference = largest(value for answer in found for value in answer.values())
        if mutant is None:
            clean[key] = difference
        return difference

    return compare


@pytest.mark.parametrize(
    ("case", "layout"),
    [pytest.param(case, layout, id=f"{case.mutant.__name__}-{case.family}-{layout}") for case in CASES for layout in case.layouts],
)
def test_a_mistake_shows(worst: Compare, record_property: Callable[[str, object], None], case: Case, layout: str):
    assert worst(case, layout, None) <= LIMIT
    difference = worst(case, layout, case.mutant.__name__)
    record_property("difference", difference)
    print(f"{case.mutant.__name__} {case.family} {layout}: {difference:.1e}")
    assert difference > max(case.at_least, LIMIT), "the comparison lets this mistake through"


def test_the_mistakes_are_undone(worst: Compare):
    """After all of them, in the same ranks, the right package is right."""
    for case in (CASES[0], CASES[-1]):
        layout = case.layouts[0]
        worst(case, layout, case.mutant.__name__)
        assert worst(Case(case.mutant, case.layouts, case.family, 3), layout, None) <= LIMIT
