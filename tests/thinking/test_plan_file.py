"""A run's `plan.json`: what goes on after trials, and files of other versions."""

import json

import pytest

from longshift.trainer.plan_file import PlanFile

THREE = PlanFile("auto", ("dp2", "tp2", "pp2"))


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        (([1.0, 1.0, 1.0], [1.1, 1.1, 1.1], [1.2, 1.2, 1.2]), 2),
        (([1.0, 1.0, 1.0], [0.9, 0.9, 0.9], [1.0, 1.0, 1.0]), 0),
        (([1.0, 1.1, 0.9], [0.8, 0.8, 0.8], [1.05, 1.15, 0.95]), 0),  # the difference is within what steps vary
        (([1.0, 1.1, 0.9], [1.2, 1.3, 1.1], [1.05, 1.15, 0.95]), 1),
        (([1.0], [1.1], [1.05]), 1),
    ],
)
def test_the_first_choice_goes_on_unless_another_is_faster_by_more_than_steps_vary(trials, chosen):
    plan = THREE
    for number, rates in enumerate(trials):
        assert plan.chosen is None
        assert plan.layout == THREE.choices[number]
        plan = plan.after(rates)
    assert plan.chosen == chosen
    assert plan.layout == THREE.choices[chosen]
    assert PlanFile.from_json(plan.to_json()) == plan


def test_a_plan_without_errors_is_read():
    told = json.loads(THREE.after([2.0, 3.0, 4.0]).to_json())
    del told["errors"]
    plan = PlanFile.from_json(json.dumps(told))
    assert (plan.rates, plan.errors) == ((3.0,), (0.0,))
    assert plan.after([1.0]).after([9.0]).chosen == 2
