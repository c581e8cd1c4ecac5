"""Ranking of tried layouts, by predicted and measured seconds together."""

import math

import numpy as np
import pytest

from longshift.trainer.plan_file import (
    PREDICTION_ERROR,
    STEP_NOISE,
    TrialResult,
    expected_seconds,
    fastest_trial,
)


def make_trial(typical_s: float, *ratios: float, clock_s: float = 3.0) -> TrialResult:
    """A trial whose steps took `ratios` times the predicted seconds."""
    measured_s = tuple(clock_s * ratio for ratio in ratios)
    return TrialResult(typical_s, measured_s, (clock_s,) * len(ratios))


def test_ranking_keeps_the_predicted_order_when_steps_match_it():
    """All layouts are 1.3 times slower than predicted: the machine is slow, no layout is."""
    trials = [make_trial(typical_s, 1.3, 1.3, 1.3) for typical_s in (2.1, 2.0, 2.2)]
    assert fastest_trial(trials) == 1
    assert expected_seconds(trials) == pytest.approx([2.1, 2.0, 2.2])


def test_ranking_ignores_how_long_the_documents_of_a_trial_were():
    """The second layout had shorter documents. Both took as long as predicted for theirs."""
    long_documents = make_trial(2.0, 1, 1, 1, clock_s=9.0)
    short_documents = make_trial(2.1, 1, 1, 1, clock_s=0.5)
    assert fastest_trial([long_documents, short_documents]) == 0


def test_ranking_follows_measurements_when_steps_agree():
    """Log ratios of +-0.05 around their mean, without noise."""
    slower = make_trial(2.0, *[math.exp(0.05)] * 3)
    faster = make_trial(2.1, *[math.exp(-0.05)] * 3)
    assert fastest_trial([slower, faster]) == 1


def test_ranking_shrinks_noisy_measurements_to_the_prediction():
    """The same means, but the steps of a layout differ by 0.2."""
    deviations = (-0.2, 0, 0.2)
    slower = make_trial(2.0, *(math.exp(0.05 + deviation) for deviation in deviations))
    faster = make_trial(2.1, *(math.exp(-0.05 + deviation) for deviation in deviations))
    shrink = PREDICTION_ERROR**2 / (PREDICTION_ERROR**2 + 0.2**2 / 3)
    expected = [2.0 * math.exp(0.05 * shrink), 2.1 * math.exp(-0.05 * shrink)]
    assert fastest_trial([slower, faster]) == 0
    assert expected_seconds([slower, faster]) == pytest.approx(expected)


def test_ranking_assumes_a_noise_when_each_layout_has_one_step():
    slower, faster = make_trial(2.0, math.exp(0.05)), make_trial(2.1, math.exp(-0.05))
    shrink = PREDICTION_ERROR**2 / (PREDICTION_ERROR**2 + STEP_NOISE**2)
    expected = [2.0 * math.exp(0.05 * shrink), 2.1 * math.exp(-0.05 * shrink)]
    assert expected_seconds([slower, faster]) == pytest.approx(expected)


def test_ranking_keeps_the_predicted_order_without_predictions_of_the_steps():
    trials = [TrialResult(2.0, (9.0, 9.0), ()), TrialResult(1.9, (99.0, 99.0), ())]
    assert expected_seconds(trials) == [2.0, 1.9]
    assert fastest_trial(trials) == 1
    assert fastest_trial([make_trial(2.0, 1.2, 1.2), TrialResult(1.9, (), ())]) == 1


def test_ranking_survives_one_disturbed_step():
    """One step of the best layout took three times as long."""
    disturbed = make_trial(2.0, 1.0, 3.0, 0.98)
    others = [make_trial(typical_s, 1.0, 1.02, 0.98) for typical_s in (2.3, 2.4, 2.5)]
    assert fastest_trial([disturbed, *others]) == 0


@pytest.mark.parametrize(("prediction_error", "noise"), [(0.03, 0.03), (0.06, 0.07), (0.06, 0.15), (0.1, 0.07)])
def test_ranking_beats_predictions_alone_and_hardly_loses_to_measurements_alone(prediction_error: float, noise: float):
    """Mean seconds lost against the fastest of four layouts, with three steps each.

    The prediction of each layout is off by a factor of its own.
    """
    generator = np.random.default_rng(0)
    lost = np.zeros(3)
    for _ in range(3000):
        predicted_s = generator.uniform(2.0, 2.2, 4)
        error = np.exp(generator.normal(0, prediction_error, 4))
        ratios = error[:, None] * np.exp(generator.normal(0, noise, (4, 3)))
        true_s = predicted_s * error
        trials = [make_trial(*row) for row in np.column_stack((predicted_s, ratios)).tolist()]
        choices = (
            fastest_trial(trials),
            int(np.argmin(predicted_s)),
            int(np.argmin(predicted_s * np.exp(np.log(ratios).mean(1)))),
        )
        lost += [true_s[choice] / true_s.min() - 1 for choice in choices]
    by_ranking, by_prediction, by_measurement = lost / 3000
    assert by_ranking < 0.03
    assert by_ranking < by_prediction
    assert by_ranking < by_measurement * 1.15
