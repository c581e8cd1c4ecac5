"""The timeout of collectives: the longest that a replica may wait for another, at a FLOP/s that every device reaches."""

import pytest

from longshift.config_file import parse_config
from longshift.errors import UsageError
from longshift.layout.layout import Layout
from longshift.spec.families import PRESETS
from longshift.spec.model import ModelSpec
from longshift.workload.groups import LEAST_S, SLOW_FLOPS, Edge, length_groups, timeout_s

TINY = ModelSpec("llama", 257, 40, 5, 6, 2, 10, 37, 4096)
EIGHT_B = ModelSpec("llama", 128256, 4096, 32, 32, 8, 128, 14336, 1 << 20)
MILLION = 1 << 20
GPU = SLOW_FLOPS["cuda"]


def edges(*pairs: tuple[int, str]) -> list[Edge]:
    return [Edge(upto, Layout.parse(text)) for upto, text in pairs]


def slowest_s(edges: list[Edge], lengths: list[int], flops_per_s: float) -> float:
    """Of the replicas of a step, over all groups."""
    groups = length_groups(lengths, edges, EIGHT_B)
    return sum(max(sum(g.costs[p] for p in share) for share in g.shares) / g.layout.sequence for g in groups) / flops_per_s


def test_short_steps_keep_ten_minutes():
    assert timeout_s(TINY, edges((4096, "dp4")), 4096, 1 << 16, GPU) == LEAST_S == 600.0


@pytest.mark.parametrize(
    "at",
    [
        edges((MILLION, "dp4.chunk64K.host")),
        edges((MILLION, "pp2.dp2.u2.chunk64K.host")),
        edges((8192, "dp8"), (MILLION, "dp2.u4.chunk64K.host")),
        edges((8192, "dp4.tp2"), (65536, "dp2.u4"), (MILLION, "u8.chunk64K.host")),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "lengths", [[MILLION], [MILLION, *[4096] * 64], [8192] * 256 + [MILLION], [MILLION] * 2, [60_000] * 17 + [10] * 99]
)
def test_a_collective_outlasts_the_slowest_replica(at, lengths):
    """Which may wait for hours where the FLOP/s are the least, and does so by more than ten minutes."""
    allowed = timeout_s(EIGHT_B, at, MILLION, MILLION, GPU)
    needed = slowest_s(at, lengths, GPU)
    assert needed <= allowed
    if MILLION in lengths:
        assert needed > LEAST_S
        assert allowed < 6 * needed


def test_more_ranks_a_document_wait_less_and_longer_documents_more():
    one, four = (timeout_s(EIGHT_B, edges((MILLION, f"u{n}")), MILLION, MILLION, GPU) for n in (1, 4))
    assert one == pytest.approx(4 * four)
    piped = timeout_s(EIGHT_B, edges((MILLION, "pp4")), MILLION, MILLION, GPU)
    assert piped == one
    assert timeout_s(EIGHT_B, edges((MILLION, "u4")), MILLION // 2, MILLION, GPU) < four


def test_a_config_says_how_long_or_leaves_it_to_the_model():
    text = (
        "{model: {preset: tiny-llama}, data: {train: [{corpus: python}], max_len: 32K}, save: {dir: runs/x}, train: {tokens_per_step: 32K"
    )
    derived = parse_config(text + ", steps: 1, lr: 1}}")
    assert derived.train.timeout is None
    at = timeout_s(PRESETS["tiny-llama"], derived.edges, 32768, 32768, SLOW_FLOPS["cpu"])
    assert derived.timeout_s("cpu") == at
    assert derived.timeout_s("cuda") == LEAST_S
    assert parse_config(text + ", steps: 1, lr: 1, timeout: 30}}").timeout_s("cpu") == 30.0
    with pytest.raises(UsageError, match=r"train\.timeout"):
        parse_config(text + ", steps: 1, lr: 1, timeout: 0}}")
