"""What a run's ranks need before it starts: from few ranks and few chunks, the same as from all."""

import random
from dataclasses import replace

import caches
import pytest
import torch
from torch import Tensor

from longshift.cluster.files import cluster as named
from longshift.layout.home_tiers import HomeTiers
from longshift.layout.layout import Layout
from longshift.model.decoder import Block, Ops
from longshift.model.packed_attention import LONG
from longshift.simulate.clock import Clock, GroupPacks
from longshift.simulate.cost import OF_PRESETS, PASSES, Cost
from longshift.simulate.habits import habits
from longshift.simulate.mesh import Mesh
from longshift.simulate.rates import rates
from longshift.spec.formats import FORMATS
from longshift.spec.model import ModelSpec, Rope
from longshift.switch.itinerary import Itinerary
from longshift.switch.links import assumed
from longshift.switch.options import SwitchOptions
from longshift.weigh import activation_memory
from longshift.weigh import ledger as ledgers
from longshift.weigh.extrapolate_chunks import full_pack
from longshift.weigh.needs import StepShape, largest_need, largest_step, memory_needs, representative_ranks
from longshift.weigh.state_memory import saved_bytes
from longshift.weigh.turn_profile import play_collective
from longshift.workload.groups import Edge

SPEC = ModelSpec("llama", 1009, 64, 5, 6, 3, 16, 176, 1 << 16, rope=Rope())


def shape(text: str, upto: int = 2048, tokens: int = 8192) -> StepShape:
    layouts = [Layout.parse(word) for word in text.split(" > ")]
    return shape_of(*(Edge(upto >> (len(layouts) - 1 - number), layout) for number, layout in enumerate(layouts)), tokens=tokens)


def shape_of(*edges: Edge, tokens: int, longest: int = 0) -> StepShape:
    itinerary = Itinerary(SPEC, edges, assumed(2), 2, 4, SwitchOptions(bucket_bytes=1 << 20))
    return StepShape(itinerary, edges, FORMATS["bf16"], tokens, longest or edges[-1].upto)


def whole_step(run: StepShape):
    """The largest step, every chunk of it."""
    edges = [run.edges[i] for i in run.itinerary.order(tuple(edge.use for edge in run.edges))]
    return largest_step(run, edges, [full_pack(edge.pack, min(edge.upto, run.longest)) for edge in edges])


@pytest.mark.parametrize(
    "text", ["dp4.z1", "tp4.z1", "tp2.u2.z3", "pp2.dp2.tp2.z2", "pp2.v2.dp2", "ring2.tp3", "dp4 > pp2.tp2", "dp4.z3 > dp2.tp2.z2 > u2.pp2"]
)
def test_no_rank_needs_more_than_those_that_are_weighed(text: str):
    run = shape(text)
    step = whole_step(run)
    every = [run.ledger(rank, "gloo").play(*step).device for rank in range(run.edges[0].use.world)]
    assert largest_need(memory_needs(run, run.edges, "gloo")).device.total == max(every)


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("text", ["dp1", "recompute-full", "recompute-selective", "u2", "ring2"])
def test_no_pack_of_a_gpu_needs_more_than_the_one_that_is_weighed(text: str, kv_heads: int, windowed: bool):
    """Of a model whose peak is attention's. Documents of many lengths: with kernels that are cut for them, in calls of their own or not.
    Of two blocks, the first may have a window."""
    spec = ModelSpec("llama", 61, 64, 2, 8, kv_heads, 32, 32, 1 << 16, rope=Rope())
    if windowed:
        spec = replace(spec, sliding_window=512, full_blocks=(2,))
    layout, rng = Layout.parse(text), random.Random(1)
    for upto, capacity in ((16384, 32768), (32768, 32768), (5000, 32768)):
        edges = (Edge(upto, layout, capacity),)
        itinerary = Itinerary(spec, edges, assumed(2), 2, 4, SwitchOptions(bucket_bytes=1 << 20))
        run = StepShape(itinerary, edges, FORMATS["bf16"], capacity, upto)
        said = largest_need(memory_needs(run, edges, "nccl")).device.total
        for _ in range(12):
            pack: list[int] = []
            while sum(pack) < capacity:
                most_ = min(upto, capacity - sum(pack))
                pack.append(min(most_, rng.choice([most_, most_ - 1, 8192, LONG, LONG - 1, 4096, rng.randint(1, upto)]) or 1))
            step = largest_step(run, edges, [tuple(pack)])
            found = run.ledger(0, "nccl").play(*step).device
            assert found <= 1.002 * said, (pack, found / said)


@pytest.mark.parametrize("home", ["device", "host", "disk"])
@pytest.mark.parametrize(
    "text", ["dp2.z1", "dp2.z3", "tp2.recompute-full.z2", "pp2.v2.z2", "pp2.gpipe", "dp2.z3 > u2.z2", "dp2.z1 > tp2.z1"]
)
def test_a_first_step_leaves_what_its_first_micro_batches_leave(text: str, home: str, monkeypatch: pytest.MonkeyPatch):
    """What a later step holds after each operation, needs and sends does not depend on how many micro-batches the first one has."""
    run = replace(shape(text, tokens=1 << 15), home_in=HomeTiers(home))

    def played() -> list:
        found = []
        for rank in representative_ranks(run):
            ledger, after = run.ledger(rank, "nccl"), []
            weighed = ledger.play(*whole_step(run), lambda op, book=ledger.allocations, rows=after: rows.append((op, dict(book.now))))
            peaks = {place: peak.total for place, peak in weighed.peaks.items()}
            found.append((after, peaks, weighed.sent, weighed.moved, weighed.flops))
        return found

    short = played()
    monkeypatch.setattr(ledgers, "_first_micro", lambda visit, packs: visit)
    assert short == played()


MESHES = ("dp1", "u2", "pp2", "tp2", "ring2", "dp2.z3", "dp2.z1")
TIERS = ("", ".host", ".disk", ".every1", ".every2", ".host.kv-offload", ".disk.kv-offload", ".disk.fpdt", ".host.fpdt")


def random_run(rng: random.Random) -> tuple[StepShape, bool]:
    """Up to two groups, the larger one of up to 72 chunks, and whether its documents end with chunks, or are so few that it does not
    matter."""
    mesh, chunks = rng.choice(MESHES), rng.choice([17, 30, 48, 72])
    upto, layout = chunks * 64 - rng.choice([0, 0, 17]), Layout.parse(f"{mesh}.chunk64{rng.choice(TIERS)}")
    longest = rng.choice([upto, upto, int(upto * 0.7), upto // 3 // 64 * 64, 320, 333])
    before = rng.choice([None, mesh, f"{mesh}.chunk64{rng.choice(TIERS)}"])
    edges = [Edge(rng.choice([8, 20, 40]) * 64, Layout.parse(before))] if before else []
    edges = [edge for edge in edges if edge.upto < upto] + [Edge(upto, layout)]
    run = shape_of(*edges, tokens=2 * upto, longest=longest)
    return run, longest % 64 == 0 or all(edge.upto // longest < 4 for edge in edges)


@pytest.mark.parametrize("seed", range(40))
def test_what_many_chunks_need_follows_from_few(seed: int):
    rng = random.Random(seed)
    (run, exact), transport = random_run(rng), rng.choice(["gloo", "nccl"])
    for rank, found in zip(representative_ranks(run), memory_needs(run, run.edges, transport)):
        weighed = run.ledger(rank, transport).play(*whole_step(run))
        for place, peak in weighed.peaks.items():
            assert peak.total <= found.of(place) <= peak.total * (1.001 if exact else 1.35), (place, peak.op)
        for told, counted in ((found.estimate.sent, weighed.sent), (found.estimate.moved, weighed.moved)):
            for name, size in counted.items():
                assert size * (0.98 if exact else 0.9) - 1 <= told.get(name, 0) <= size * (1.001 if exact else 1.35) + 1, name


def test_a_peak_is_the_most_of_all_moments(monkeypatch: pytest.MonkeyPatch):
    """The peak of few chunks is in a unit's loss, that of 192 in a block's backward."""
    run = shape_of(Edge(512, Layout.parse("dp1")), Edge(192 * 64, Layout.parse("dp1.chunk64")), tokens=192 * 64)
    weighed = run.ledger(0, "gloo").play(*whole_step(run)).device
    (found,) = memory_needs(run, run.edges, "gloo")
    assert weighed <= found.of("device") <= weighed * 1.001
    monkeypatch.setattr(activation_memory, "chunk_positions", lambda sees: [(0,) for _ in sees])  # a mutant that takes all chunks for alike
    with pytest.raises(AssertionError):
        test_what_many_chunks_need_follows_from_few(27)


def test_a_step_has_as_many_packs_as_its_tokens_fill():
    (visit,), (packs,) = whole_step(shape("dp2", 1024, 8192))
    assert visit.micros == len(packs) == 3
    assert packs[0] == (1024,)
    run = replace(shape("dp2", 1024, 8192), longest=400)
    (visit,), (packs,) = whole_step(run)
    assert packs[0] == (400, 400, 224)
    run = shape_of(Edge(256, Layout.parse("dp2"), 640), Edge(1024, Layout.parse("dp2")), tokens=2048)
    (short, long), (packs, whole) = whole_step(run)
    assert (packs, whole) == ([(256, 256, 128)] * 2, [(1024,)] * 2)
    assert (short.micros, long.micros) == (2, 2)


def test_the_last_document_of_a_step_may_begin_before_its_end():
    """Of two documents of 1,000 tokens the second begins at token 1,000 of 1,024."""
    run = shape_of(Edge(1024, Layout.parse("dp1")), tokens=1024)
    (visit,), _ = whole_step(run)
    assert visit.micros == 2
    (visit,), _ = whole_step(replace(run, tokens=1))
    assert visit.micros == 1


@pytest.mark.parametrize("text", ["dp2", "tp2.recompute-full", "u2.chunk64.host"])
def test_a_larger_pack_needs_and_sends_more(text: str):
    layout = Layout.parse(text)

    def weighed(**pack: int) -> tuple[int, dict[str, int], dict[str, int]]:
        run = shape_of(Edge(512, layout, **pack), Edge(2048, Layout.parse("tp2")), tokens=4096)
        found = largest_need(memory_needs(run, run.edges[:1], "nccl"))
        one = run.pack_estimate(run.edges[0], found.rank, "nccl")
        return sum(peak.total for peak in found.estimate.peaks.values()), one.sent, one.moved

    (small, sent, moved), (same, *_), (large, more_sent, more_moved) = weighed(), weighed(pack=512), weighed(pack=2048)
    assert small == same < large
    kinds = "tp", "ulysses"
    assert all(more_sent.get(kind, 0) == 4 * sent.get(kind, 0) for kind in kinds)
    assert all(more_moved[way] == 4 * size for way, size in moved.items())


@pytest.mark.parametrize("text", ["dp1", "dp4", "dp4.z1", "tp2.u2.z3", "pp2.dp2", "dp4.z3 > dp2.tp2.z2"])
def test_copies_for_checkpoints_hold_the_state_once(text: str):
    """One rank speaks for what several keep."""
    run = shape(text)
    assert sum(saved_bytes(run.steps(rank)) for rank in range(run.edges[0].use.world)) == 3 * 4 * SPEC.parameters


def test_a_new_primitive_of_the_model_is_weighed_and_timed_without_a_word(monkeypatch: pytest.MonkeyPatch):
    """Each block also adds tanh(x xᵀ) x: twice 2 T² D FLOPs forward and four times backward, and T² saved numbers of two bytes."""
    run, layers, tokens, width = shape("dp1"), SPEC.layers, 2048, SPEC.width
    machine = named("1xh100")
    cost = Cost(SPEC, rates(machine, "bf16"), habits(False, "bf16", machine.device))
    native = Block.mlp

    def mlp(block: Block, x_TD: Tensor, ops: Ops) -> Tensor:
        return native(block, x_TD, ops) + torch.tanh(x_TD @ x_TD.mT) @ x_TD

    def seconds() -> list[float]:
        """Of matmuls forward and backward, of passes over memory forward, and of a step."""
        works = [cost.turn("block", turn, "block", Mesh(), tokens, tokens**2 / 2) for turn in ("forward", "backward")]
        step = Clock(run, machine, cost).step([GroupPacks(run.edges[0].use, (((tokens,),),))])
        return [float(works[0].matmul_s), float(works[1].matmul_s), float(works[0].elementwise_s), step.seconds]

    before, seconds_before = run.pack_estimate(run.edges[0], 0, "gloo"), seconds()
    monkeypatch.setattr(Block, "mlp", mlp)
    caches.clear()
    after, seconds_after = run.pack_estimate(run.edges[0], 0, "gloo"), seconds()
    caches.clear()
    assert after.flops - before.flops == layers * 6 * 2 * tokens**2 * width
    assert after.device - before.device >= layers * 2 * tokens**2

    scores_s, output_s, left_s = (
        OF_PRESETS * float(cost.rates.matmul_s(*sizes))
        for sizes in ((tokens, width, tokens), (tokens, tokens, width), (tokens, width, tokens))
    )
    tanh_bytes, sum_bytes = 2 * 2 * tokens**2, 3 * 2 * tokens * width
    more = [now - then for now, then in zip(seconds_after, seconds_before)]
    assert more[0] == pytest.approx(scores_s + output_s)
    assert more[1] == pytest.approx(3 * output_s + left_s)
    assert more[2] == pytest.approx(float(cost.rates.elementwise_s(PASSES["nccl"] * (tanh_bytes + sum_bytes))))
    assert more[3] > 0.0


@pytest.mark.parametrize("holders", [2, 3, 5])
def test_an_all_reduce_sends_its_bytes_rounded_once(holders: int):
    """As they are counted where ranks run: elements need not divide evenly."""
    sent = play_collective("nccl", "reduce", "all_reduce", holders, elements=1001, item_bytes=4).begin.sent
    assert sent == {"reduce": 2 * 4004 * (holders - 1) // holders}
