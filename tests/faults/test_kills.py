"""Ranks and launchers that are killed at random moments, and runs that go on bit for bit.

`make test-all` plays a few kills; the campaign more than two hundred, over seven layouts.
"""

import random
from collections import Counter
from pathlib import Path

import figures
import pytest
from kills import LAYOUTS, Killed, _lost
from launches import Launches

KILLS = 30  # of each layout


def test_a_few_kills(launches: Launches, place: Path):
    killed = Killed(launches, place, "dp2 > tp2")
    assert killed.play(random.Random(4), 1) > 0
    assert not killed.wrong, killed.wrong
    assert killed.found["resumed_bitwise"] == 1


@pytest.mark.campaign
def test_the_campaign(launches: Launches, place: Path):
    found, wrong, total = {}, [], Counter[str]()
    for number, name in enumerate(LAYOUTS):
        killed, random_, kills = Killed(launches, place, name), random.Random(number), 0
        while kills < KILLS and len(killed.wrong) < 3:
            kills += killed.play(random_, min(8, KILLS - kills))
        found[name] = dict(killed.found)
        total += killed.found + Counter(cases=kills, resumed=killed.found["runs"])
        wrong += killed.wrong
    figures.keep("kills", total, {"layouts": found, "failures": wrong})
    assert not wrong, wrong[:3]
    assert total["cases"] >= 200


def test_the_campaign_can_fail(launches: Launches, place: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [{"step": step, "first": step in (1, 5)} for step in range(1, 7)]
    assert _lost(4, 4, rows[:4], rows) == 0
    assert _lost(4, 6, rows[:4], [*rows[:2], {"step": 3, "first": True}]) == 2
    assert _lost(4, 2, rows[:4], rows[:4]) == 2
    assert _lost(4, 4, rows[:6], rows[:4]) == 0
