"""The chunk that is chosen: the smallest that the simulator, the kernels and the memory allow."""

from dataclasses import replace

import pytest

from longshift.cluster.cluster import Link
from longshift.cluster.files import preset as machine_preset
from longshift.layout.layout import AUTO, Layout
from longshift.planner import chunk_size
from longshift.planner.chunk_size import EFFICIENT, HIDDEN, SMALLEST, Machine, choose_chunk, powers
from longshift.simulate.cost import Cost
from longshift.simulate.rates import rates
from longshift.spec.model import ModelSpec, Rope

SPEC = ModelSpec("llama", 128256, 4096, 32, 32, 8, 128, 14336, 1 << 24, rope=Rope())  # Llama-3 8B
LONGEST = 1 << 17


def machine(faster: float = 1.0, free_bytes: float = 60e9) -> Machine:
    """An H100 whose link to the host is so many times faster."""
    h100 = machine_preset("h100")
    link = h100.links["device"]
    links = {**h100.links, "device": Link(faster * link.bytes_per_s, link.latency_s)}
    faster_h100 = replace(h100, links=links)
    return Machine(faster_h100, Cost(SPEC, rates(faster_h100, "bf16")), free_bytes)


def bytes_of(tokens: int) -> int:
    """A rank needs more with larger chunks."""
    return 100_000_000 + 100_000 * tokens


def chosen(layout: str, *where: float) -> int:
    return choose_chunk(SPEC, Layout.parse(layout), LONGEST, machine(*where), bytes_of)[0]


def test_the_word():
    assert Layout.parse("u2.chunk-auto.disk").chunk == AUTO
    assert str(Layout.parse("u2.chunk-auto.disk")) == "u2.chunk-auto.disk"
    assert powers(1) == [SMALLEST]
    assert powers(SMALLEST + 1) == [SMALLEST, 2 * SMALLEST]
    assert powers(1500, 600) == [1024, 2048]


@pytest.mark.parametrize("layout", ["chunk-auto.host", "u8.chunk-auto.host.kv-offload"])
def test_it_is_the_smallest_that_does(layout: str):
    cut, where = Layout.parse(layout), machine()
    sizes = powers(LONGEST)
    rates = [chunk_size._attention_rate(SPEC, cut, tokens, where) for tokens in sizes]
    tokens, why = choose_chunk(SPEC, cut, LONGEST, where, bytes_of)
    assert "the smallest that hides transfers and keeps kernels efficient" in why
    for size, rate in zip(sizes, rates):
        does = chunk_size._hidden_share(SPEC, cut, size, LONGEST, where) >= HIDDEN and rate / max(rates) >= EFFICIENT
        assert does == (size >= tokens)
        if size == tokens:
            break


def test_slower_links_and_the_papers_order_need_larger_chunks():
    slow, fast = (chosen("chunk-auto.host.kv-offload", faster) for faster in (0.25, 1000.0))
    assert slow > fast
    assert chosen("chunk-auto.host.kv-offload.fpdt", 0.25) > slow
    assert fast == chosen("chunk-auto.host", 1000.0)  # nothing is left but the kernels
    assert chosen("chunk-auto", 1e-6) == fast  # and nothing moves without a tier


def test_what_does_not_fit_is_not_chosen():
    kept = Layout.parse("chunk-auto.host.kv-offload")
    tokens, why = choose_chunk(SPEC, kept, LONGEST, machine(1.0, 0.3e9), bytes_of)
    assert tokens < chosen("chunk-auto.host.kv-offload")
    assert why.startswith("the best that fits, or nearly; none hides transfers")
    tokens, why = choose_chunk(SPEC, kept, LONGEST, machine(1.0, 1e6), bytes_of)
    assert tokens == SMALLEST
    assert why.startswith("the smallest, and more than is free")
