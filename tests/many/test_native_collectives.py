"""Groups of GPUs use NCCL's own all-gather, reduce-scatter and all-reduce, where those of gloo trade pieces. Here the same branches run on
gloo's own collectives: what they are given is contiguous and of the right sizes, pairs that first meet wait for each other as NCCL's
do, and training is one process's."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from forked import DEADLINE_S, Truth, Worlds
from parity import EDGES, KINDS, LIMIT, largest, trial_of
from torch import Tensor
from trial import compare

from longshift.dist.collectives import Group, Pending
from longshift.dist.world import World
from longshift.layout.layout import Layout

STEPS = 6
CONTACT = 1 << 30  # a tag of no transfer


def compare_natively(world: World, **arguments) -> tuple[dict[str, float], int]:
    """`compare`, and how many groups of several ranks took part."""
    world.forget()
    made, groups = Group.__init__, []

    def native(group: Group, *how) -> None:
        made(group, *how)
        groups.append(group.direct)
        group.direct = group.swaps = False

    known, send, receive = set(), Group.send, Group.receive

    def meets(group: Group, other: int) -> None:
        """[Note: first contact]"""
        pair = (group.handle, *sorted((group.index, other)))
        if pair not in known:
            known.add(pair)
            token = torch.zeros(1)
            for move in (dist.send, dist.recv) if group.index < other else (dist.recv, dist.send):
                move(token, group=group.handle, tag=CONTACT, **{"group_dst" if move is dist.send else "group_src": other})

    def sending(group: Group, x: Tensor, to: int, tag: int) -> Pending:
        meets(group, to)
        return send(group, x, to, tag)

    def receiving(group: Group, out: Tensor, source: int, tag: int) -> Pending:
        meets(group, source)
        return receive(group, out, source, tag)

    with patch.multiple(Group, __init__=native, send=sending, receive=receiving):
        found = compare(world, **arguments)
    return found, sum(groups)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", "dp2"),
        ("llama", "dp3.z1"),
        ("llama-tied", "dp2.z2"),
        ("qwen3", "tp2"),
        ("llama-6-heads", "tp4.z2"),
        ("llama", "ring2.u2.z3"),
        ("llama-tied", "pp2.dp2.tp2.z3"),
        ("llama-6-heads", "u2.z1.chunk24.disk.kv-offload.fpdt"),
        ("llama-tied", "dp4.z2 > u4 > pp2.tp2"),
        ("llama", "dp2.tp2.z3 > pp2.dp2.z2 > dp4.z3"),
    ],
)
def test_a_layout_is_one_process(worlds: Worlds, truth: Truth, family: str, layout: str):
    what, size = trial_of(family, STEPS), Layout.parse(layout.split(" > ")[0]).world
    trial = trial_of(family, STEPS, edges=EDGES) if ">" in layout else what
    arguments = {"trial": trial.to_json(), "layout": layout, "path": truth(what)}
    answers = worlds(size).call("test_native_collectives:compare_natively", DEADLINE_S, **arguments)
    assert all(groups > 0 for _, groups in answers)
    assert all(largest(found[kind] for found, _ in answers) <= LIMIT for kind in KINDS), answers


@pytest.mark.parametrize("layout", ["pp2", "pp4.gpipe", "pp2.v2"])
def test_a_pipeline_runs_one_pack_where_a_pair_waits_for_each_other_when_they_first_meet(worlds: Worlds, truth: Truth, layout: str):
    what = trial_of("llama", 1, capacity=4096)
    arguments = {"trial": what.to_json(), "layout": layout, "path": truth(what)}
    answers = worlds(Layout.parse(layout).world).call("test_native_collectives:compare_natively", DEADLINE_S, **arguments)
    assert all(largest(found[kind] for found, _ in answers) <= LIMIT for kind in KINDS), answers
