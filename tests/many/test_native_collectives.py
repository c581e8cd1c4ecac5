"""Groups of GPUs use NCCL's own all-gather, reduce-scatter and all-reduce, where those of gloo trade pieces. Here the same branches run on
gloo's own collectives: what they are given is contiguous and of the right sizes, and training is one process's."""

from unittest.mock import patch

import pytest
from conftest import DEADLINE_S, Truth, Worlds
from parity import EDGES, KINDS, LIMIT, largest, trial_of

from longshift.dist.collectives import Group
from longshift.dist.world import World
from longshift.layout.layout import Layout
from longshift.train.check import compare

STEPS = 6


def compare_natively(world: World, **arguments) -> tuple[dict[str, float], int]:
    """`compare`, and how many groups of several ranks took part."""
    world.forget()
    made, groups = Group.__init__, []

    def native(group: Group, *how) -> None:
        made(group, *how)
        groups.append(group.direct)
        group.direct = group.swaps = False

    with patch.object(Group, "__init__", native):
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
