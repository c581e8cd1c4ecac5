"""What a run's ranks need before it starts: from few ranks and few chunks, the same as from all."""

from dataclasses import replace

import pytest

from longshift.layout.layout import Layout
from longshift.program import needs as module
from longshift.program.needs import StepShape, largest_step, most, needs
from longshift.spec.formats import FORMATS
from longshift.spec.model import ModelSpec, Rope
from longshift.switch.itinerary import Itinerary, SwitchOptions
from longshift.switch.links import assumed
from longshift.workload.groups import Edge

SPEC = ModelSpec("llama", 1009, 64, 5, 6, 3, 16, 176, 1 << 16, rope=Rope())


def shape(text: str, upto: int = 2048, tokens: int = 8192) -> StepShape:
    layouts = [Layout.parse(word) for word in text.split(" > ")]
    edges = tuple(Edge(upto >> (len(layouts) - 1 - number), layout) for number, layout in enumerate(layouts))
    itinerary = Itinerary(SPEC, edges, assumed(2), 2, 4, SwitchOptions(bucket_bytes=1 << 20))
    return StepShape(itinerary, edges, FORMATS["bf16"], tokens, upto)


@pytest.mark.parametrize(
    "text", ["dp4.z1", "tp4.z1", "tp2.u2.z3", "pp2.dp2.tp2.z2", "pp2.v2.dp2", "ring2.tp3", "dp4 > pp2.tp2", "dp4.z3 > dp2.tp2.z2 > u2.pp2"]
)
def test_no_rank_needs_more_than_those_that_are_weighed(text: str):
    run = shape(text)
    order = run.itinerary.order(tuple(edge.use for edge in run.edges))
    step = largest_step(run, [run.edges[i] for i in order])
    every = [run.ledger(rank, "gloo", True).play(*step).device for rank in range(run.edges[0].use.world)]
    assert most(needs(run, run.edges, "gloo", True)).device.total == max(every)


@pytest.mark.parametrize("words", ["host", "disk.kv-offload", "disk.fpdt", "disk.every2.keep-input"])
def test_many_chunks_follow_from_few(words: str, monkeypatch: pytest.MonkeyPatch):
    run = shape(f"chunk64.{words}", 48 * 64)
    (few,) = needs(run, run.edges, "nccl", False)
    monkeypatch.setattr(module, "MOST_CHUNKS", 64)
    (all_,) = needs(run, run.edges, "nccl", False)
    for place, peak in all_.weighed.peaks.items():
        assert peak.total <= few.of(place) * 1.001
        assert few.of(place) <= peak.total * 1.01
    assert few.weighed.moved["put"] >= all_.weighed.moved["put"] * 0.99


def test_a_step_has_as_many_packs_as_its_tokens_fill():
    (visit,), (packs,) = largest_step(shape("dp2", 1024, 8192), shape("dp2", 1024).edges)
    assert visit.micros == len(packs) == 4
    assert packs[0] == (1024,)
    run = replace(shape("dp2", 1024, 8192), longest=400)
    (visit,), (packs,) = largest_step(run, run.edges)
    assert packs[0] == (400, 400, 224)
