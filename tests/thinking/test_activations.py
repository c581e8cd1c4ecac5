"""What `recompute-auto` becomes: the fastest that fits, by the ledger's bytes and the clock's seconds."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from longshift.cluster.files import preset as machine_preset
from longshift.layout.layout import Layout
from longshift.planner.activations import choose_activations
from longshift.simulate.clock import Clock, GroupPacks
from longshift.simulate.cost import Cost
from longshift.simulate.rates import rates
from longshift.spec.formats import FORMATS
from longshift.spec.model import ModelSpec, Rope
from longshift.switch.itinerary import Itinerary
from longshift.switch.links import links_of
from longshift.switch.options import SwitchOptions
from longshift.weigh.needs import StepShape, largest_need, memory_needs
from longshift.workload.groups import Edge

BLOCKS, TOKENS = 6, 16 << 10
SPEC = ModelSpec("llama", 32000, 4096, BLOCKS, 32, 8, 128, 14336, 1 << 24, rope=Rope())
H100 = machine_preset("h100")


def shape(way: Layout) -> StepShape:
    edges = (Edge(TOKENS, way),)
    itinerary = Itinerary(SPEC, edges, links_of(H100, way.world, 1), 2, 4, SwitchOptions())
    return StepShape(itinerary, edges, FORMATS["bf16"], 1, TOKENS)  # steps of one pack


@cache
def bytes_of(way: Layout) -> int:
    return largest_need(memory_needs(shape(way), [Edge(TOKENS, way)], "nccl")).device.total


@cache
def seconds_of(way: Layout) -> float:
    clock = Clock(shape(way), H100, Cost(SPEC, rates(H100, "bf16")))
    return clock.step([GroupPacks(way, (((TOKENS,),),) * way.dp)]).seconds


def all_ways(layout: Layout) -> list[Layout]:
    found = [replace(layout, offload="device", recompute=recompute) for recompute in ("none", "selective")]
    for tier, kept in product(dict.fromkeys(("device", layout.offload)), range(BLOCKS)):
        found.append(replace(layout, recompute="full", kept_blocks=kept, offload=tier))
    return found


@pytest.mark.parametrize("text", ["recompute-auto", "recompute-auto.host", "pp2.recompute-auto", "tp2.recompute-auto"])
def test_nothing_that_fits_is_faster(text: str):
    layout = Layout.parse(text)
    ways, blocks = all_ways(layout), -(-BLOCKS // layout.pp)
    least, largest = min(map(bytes_of, ways)), bytes_of(ways[0])
    seen = set()
    for tenth in range(11):
        free = least + (largest - least) * tenth / 10
        best, compared = choose_activations(layout, blocks, free, bytes_of, seconds_of)
        assert best.bytes == bytes_of(best.layout) <= free
        assert best.seconds <= min(seconds_of(way) for way in ways if bytes_of(way) <= free)
        assert best == compared[0]
        seen.add(best.layout)
    assert best.layout == replace(layout, recompute="none", offload="device")  # nothing is computed again, or moved, where all fits
    assert len(seen) >= 3
    assert any(way.kept_blocks for way in seen)


def test_where_nothing_fits_it_is_the_smallest():
    best, compared = choose_activations(Layout.parse("recompute-auto.host"), BLOCKS, 1e6, bytes_of, seconds_of)
    assert compared == ()
    assert best.bytes == min(map(bytes_of, all_ways(Layout.parse("recompute-auto.host"))))


def test_half_the_memory_is_worth_more_than_half_of_it_elsewhere():
    """Both sides keep the output of attention: they differ by the matmuls of the blocks that keep all."""
    layout = Layout.parse("recompute-auto.host")
    everything, again, moved = (Layout.parse(text) for text in ("dp1", "recompute-full", "recompute-full.host"))
    best, _ = choose_activations(layout, BLOCKS, (bytes_of(everything) + bytes_of(again)) / 2, bytes_of, seconds_of)
    assert min(seconds_of(again), seconds_of(moved)) > 1.1 * best.seconds


def test_more_memory_is_never_slower():
    layout = Layout.parse("recompute-auto")
    ask: Callable[[float], float] = lambda free: choose_activations(layout, BLOCKS, free, bytes_of, seconds_of)[0].seconds  # noqa: E731
    least, largest = bytes_of(Layout.parse("recompute-full")), bytes_of(Layout())
    seconds = [ask(least + (largest - least) * share / 7) for share in range(8)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 1.1 * seconds[-1]
