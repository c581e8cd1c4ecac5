"""Which of the ways that a run has tried goes on."""

import math

import numpy as np
import pytest

from longshift.planner.tried import CLOCK, NOISE, Tried, expected_s, going_on


def way(typical_s: float, *ratios: float, clock_s: float = 3.0) -> Tried:
    """A way whose steps took so many times the clock's seconds."""
    return Tried(typical_s, tuple(clock_s * ratio for ratio in ratios), (clock_s,) * len(ratios))


def test_a_way_whose_steps_do_as_the_clock_says_keeps_its_place():
    ways = [way(2.1, 1.3, 1.3, 1.3), way(2.0, 1.3, 1.3, 1.3), way(2.2, 1.3, 1.3, 1.3)]
    assert going_on(ways) == 1
    assert expected_s(ways) == pytest.approx([2.1, 2.0, 2.2])


def test_documents_of_a_step_do_not_count():
    """The second way had shorter documents and fewer seconds, and each step took just what the clock has for it."""
    assert going_on([way(2.0, 1, 1, 1, clock_s=9.0), way(2.1, 1, 1, 1, clock_s=0.5)]) == 0


def test_steps_alike_are_believed_and_steps_apart_are_not():
    """By hand: mean logarithms of +-0.05 around their middle, and a noise of 0.2 where steps differ."""
    quiet = [way(2.0, *[math.exp(0.05)] * 3), way(2.1, *[math.exp(-0.05)] * 3)]
    assert going_on(quiet) == 1
    apart = [way(2.0, *(math.exp(0.05 + d) for d in (-0.2, 0, 0.2))), way(2.1, *(math.exp(-0.05 + d) for d in (-0.2, 0, 0.2)))]
    assert going_on(apart) == 0
    shrink = CLOCK**2 / (CLOCK**2 + 0.2**2 / 3)
    assert expected_s(apart) == pytest.approx([2.0 * math.exp(0.05 * shrink), 2.1 * math.exp(-0.05 * shrink)])
    one = [way(2.0, math.exp(0.05)), way(2.1, math.exp(-0.05))]
    shrink = CLOCK**2 / (CLOCK**2 + NOISE**2)
    assert expected_s(one) == pytest.approx([2.0 * math.exp(0.05 * shrink), 2.1 * math.exp(-0.05 * shrink)])


def test_without_a_clock_the_predicted_order_stands():
    ways = [Tried(2.0, (9.0, 9.0), ()), Tried(1.9, (99.0, 99.0), ())]
    assert expected_s(ways) == [2.0, 1.9]
    assert going_on(ways) == 1
    assert going_on([way(2.0, 1.2, 1.2), Tried(1.9, (), ())]) == 1


def test_a_disturbed_step_does_not_decide():
    """One step of the best way took three times as long."""
    steps = (1.0, 1.02, 0.98)
    assert going_on([way(2.0, 1.0, 3.0, 0.98), way(2.3, *steps), way(2.4, *steps), way(2.5, *steps)]) == 0


@pytest.mark.parametrize(("clock", "noise"), [(0.03, 0.03), (0.06, 0.07), (0.06, 0.15), (0.1, 0.07)])
def test_it_loses_less_than_the_clock_alone_and_hardly_more_than_the_steps_alone(clock, noise):
    """Four ways, the clock of each off by its own factor, three steps of each. Seconds lost against the fastest, on average."""
    generator = np.random.default_rng(0)
    lost = np.zeros(3)
    for _ in range(3000):
        typical = generator.uniform(2.0, 2.2, 4)
        bias = np.exp(generator.normal(0, clock, 4))
        ratios = bias[:, None] * np.exp(generator.normal(0, noise, (4, 3)))
        true = typical * bias
        picks = (
            going_on([way(float(s), *map(float, r)) for s, r in zip(typical, ratios)]),
            int(np.argmin(typical)),
            int(np.argmin(typical * np.exp(np.log(ratios).mean(1)))),
        )
        lost += [true[pick] / true.min() - 1 for pick in picks]
    ours, by_clock, by_steps = lost / 3000
    assert ours < 0.03
    assert ours < by_clock
    assert ours < by_steps * 1.15
