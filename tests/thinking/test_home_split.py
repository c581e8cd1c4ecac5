"""A training state in several memories: which unit lies where, and what people may write."""

from dataclasses import replace

import pytest

from longshift.errors import UsageError
from longshift.layout.home_tiers import LATE, HomeTiers, StateBytes, Tier, early_units, tiers_of, trained_elements
from longshift.layout.layout import Layout
from longshift.layout.placement import buckets_of
from longshift.program.operations import Op
from longshift.program.step import Steps
from longshift.program.turns import visit_of
from longshift.spec.families import preset
from longshift.switch.itinerary import Itinerary
from longshift.switch.links import Links
from longshift.switch.options import SwitchOptions
from longshift.weigh.allocations import RankMemory
from longshift.weigh.ledger import Ledger
from longshift.workload.groups import Edge

SPEC = replace(preset("tiny-llama"), layers=6)
EACH = StateBytes(2, 4, 2, "float32")


def sizes(layout: str, rank: int, each: StateBytes) -> dict[int, int]:
    found: dict[int, int] = {}
    for bucket in buckets_of(SPEC, Layout.parse(layout), rank):
        found[bucket.unit] = found.get(bucket.unit, 0) + each.state_of(bucket, rank)
    return dict(sorted(found.items()))


def test_a_parameter_takes_16_bytes_and_fewer_where_moments_are_packed():
    total = sum(sizes("dp1", 0, EACH).values())
    assert total == 16 * SPEC.parameters
    assert sum(sizes("dp1", 0, replace(EACH, packed="bf16")).values()) == 12 * SPEC.parameters
    eight = sum(sizes("dp1", 0, replace(EACH, packed="float8")).values())
    blocks = sum(p.elements // p.shape[-1] * -(-p.shape[-1] // 128) for p in SPEC.params)
    assert eight == 10 * SPEC.parameters + 2 * 4 * blocks


@pytest.mark.parametrize("layout", ["dp1", "dp3.z3", "pp2.dp2.z1", "tp2"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_units_go_in_the_order_of_the_forward_to_the_first_memory_with_room(layout: str, share: float):
    for rank in range(Layout.parse(layout).world):
        own = sizes(layout, rank, EACH)
        device, host = int(share * sum(own.values())), int(0.5 * (1 - share) * sum(own.values()))
        found = tiers_of(HomeTiers("disk", (("device", device), ("host", host))), buckets_of(SPEC, Layout.parse(layout), rank), rank, EACH)
        assert list(found) == list(own)
        free = {"device": device, "host": host, "disk": sum(own.values())}
        for unit, size in own.items():
            assert found[unit] == next(tier for tier in free if size <= free[tier])
            free[found[unit]] -= size
    assert (set(found.values()) == {"device"}) == (share == 1.0)


@pytest.mark.parametrize("home_in", [HomeTiers("disk"), HomeTiers("disk", (("host", 8 << 20),))])
@pytest.mark.parametrize("layout", ["dp1", "dp3.z3", "pp2.dp2.z1", "tp2"])
@pytest.mark.parametrize("vocab", [8, 4096])
@pytest.mark.parametrize("tied", [True, False])
def test_the_forward_has_the_first_unit_and_a_part_of_the_others(home_in: HomeTiers, layout: str, vocab: int, tied: bool):
    spec = replace(SPEC, layers=20, vocab=vocab, tied=tied)
    for rank in range(Layout.parse(layout).world):
        mine = buckets_of(spec, Layout.parse(layout), rank)
        tiers: dict[int, Tier] = tiers_of(home_in, mine, rank, EACH)
        early = early_units(tiers, trained_elements(spec, mine, rank))
        size = {unit: sum(bucket.kept(rank) for bucket in mine if bucket.unit == unit) for unit in tiers}
        order = sorted(size, key=lambda unit: (unit != spec.units, unit))
        assert early
        assert order[0] not in early
        assert all(tiers[unit] == "disk" for unit in early)
        units = [unit for unit in order if tiers[unit] == "disk"]
        for count in range(1, len(units) + 1):
            so_far = sum(size[unit] - LATE * size[unit] * (unit not in early) for unit in units[:count])
            most = LATE * max(size[unit] for unit in units) / 2
            assert -most - LATE * size[order[0]] / 2 <= so_far < most


def test_a_forward_moves_a_quarter_of_the_bytes():
    """A forward reads all masters, and moves the record of every fifth block both ways: bytes until the first loss, by the ledger."""
    spec, layout = replace(SPEC, layers=32, vocab=8), Layout.parse("dp1.vertical.recompute-full")
    steps = Steps(Itinerary(spec, [Edge(64, layout)], Links(1, 1.0, 1.0), 4, 4, SwitchOptions()), 0, 4, 4, HomeTiers("disk"))
    ledger, early = Ledger(RankMemory(steps, "gloo", True)), list[int]()

    def after(op: Op) -> None:
        if op.turn == "loss":
            early.append(ledger.memory.moved["home in"] + ledger.memory.moved["home out"])

    moved = ledger.play([visit_of(spec, layout, [[64], [64]])], [[[64], [64]]], after).moved
    assert moved["home in"] + moved["home out"] == 32 * sum(steps.kept.values())
    assert 0.24 < early[0] / (32 * sum(steps.kept.values())) < 0.32


@pytest.mark.parametrize("text", ["device", "host", "disk", "device 8G, host rest", "device 1M, host 2M, disk rest", "host 3K, disk rest"])
def test_what_is_written_reads_back(text: str):
    found = HomeTiers.parse(text)
    assert str(found) == text
    assert HomeTiers.parse(found.to_json()) == found


@pytest.mark.parametrize(
    "text", ["", " , ", "memory", "device 8G", "device 8G, host", "device 8G x, host rest", "disk 8G, host rest", 3, {}]
)
def test_what_is_no_place_is_refused(text: object):
    with pytest.raises(UsageError):
        HomeTiers.parse(text)
