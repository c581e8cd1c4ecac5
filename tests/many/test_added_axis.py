"""An axis that is added in a file of the tests trains as one process does, and ledger and clock know what it sends."""

import numpy as np
import pytest
from added_axis import CONTEXT, added
from forked import DEADLINE_S, Truth, Worlds
from parity import EDGES, KINDS, LIMIT, largest, trial_of
from test_parity import switched_trial

from longshift.cluster.files import cluster
from longshift.layout.layout import Layout, number_fields
from longshift.layout.legal import faults
from longshift.planner.candidates import enumerate_layouts
from longshift.planner.shortlist import Problem, compare, shortlist
from longshift.planner.task import PlanTask
from longshift.schedule.sequence import pack_order
from longshift.simulate.cost import Cost
from longshift.simulate.mesh import Mesh
from longshift.simulate.rates import rates
from longshift.spec.model import ModelSpec
from longshift.weigh.recorder import Collective
from longshift.weigh.turn_profile import RankSetup, unit_turn
from longshift.workload.length_file import Lengths

SPEC = ModelSpec("llama", 61, 64, 2, 4, 2, 16, 96, 128)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", "cp2.z2"),
        ("qwen3", "pp2.cp2.z3"),
        ("gemma3", "cp2.tp2.recompute-full"),
        ("llama-6-heads", "cp2.u2.z1"),
        ("lora", "dp2.cp2.recompute-selective"),
    ],
)
def test_an_added_axis_is_one_process(worlds: Worlds, truth: Truth, family: str, layout: str):
    trial = trial_of(family, 4)
    with added():
        size = Layout.parse(layout).world
    arguments = {"trial_json": trial.to_json(), "layout": layout, "path": truth(trial)}
    answers = worlds(size).call("added_axis:compare", DEADLINE_S, **arguments)
    assert all(largest(answer[kind] for answer in answers) <= LIMIT for kind in KINDS), answers


@pytest.mark.parametrize("groups", ["dp4 > cp2.tp2.z3 > cp4", "dp2.cp2 > ring2.tp2 > cp4.recompute-full"])
def test_a_step_that_switches_to_an_added_axis_is_one_process(worlds: Worlds, truth: Truth, groups: str):
    trial = switched_trial("llama", edges=EDGES, bucket_bytes=20_000)
    arguments = {"trial_json": trial.to_json(), "layout": groups, "path": truth(switched_trial("llama"))}
    answers = worlds(4).call("added_axis:compare", DEADLINE_S, **arguments)
    assert all(largest(answer[kind] for answer in answers) <= LIMIT for kind in KINDS), answers


def test_an_added_axis_is_weighed_and_timed():
    """Forward of 8,192 tokens on two ranks: each sends its half of q [T, 4, 16], k and v [T, 2, 16] in bf16 to the other, on any clock for
    some time."""
    with added():
        layout, tokens = Layout.parse("cp2.dp3"), 8192
        setup = RankSetup(SPEC, layout, layout.coord(1), 2, "nccl")
        profile = unit_turn(setup, pack_order(layout, [tokens]), "block", "forward")
        sent = [call for call in profile.calls if isinstance(call, Collective)]
        assert {call.axis for call in sent} == {CONTEXT.name}
        assert sum(call.size_bytes for call in sent) == tokens * (4 + 2 + 2) * 16 * 2
        cost = Cost(SPEC, rates(cluster("64xh100")))
        turn = cost.turn("block", "forward", "block", Mesh.of(layout), tokens, tokens**2 / 2)
        alone = cost.turn("block", "forward", "block", Mesh(), tokens / 2, tokens**2 / 4)
        assert turn.traffic_s[CONTEXT.name] > 0
        assert float(turn.matmul_s) == pytest.approx(float(alone.matmul_s), rel=1e-9)
        assert (str(layout), layout.world, layout.ranks(CONTEXT.name, of=4)) == ("dp3.cp2", 6, (4, 5))
        assert faults(SPEC, layout, 6) == ()
    assert "cp" not in number_fields()


def test_a_plan_may_choose_an_added_axis():
    """Where it is fixed, and beside all others where nothing is."""
    with added():
        possible = enumerate_layouts(SPEC, 8).candidates
        assert set(possible.degree(CONTEXT.name).tolist()) == {1, 2, 4, 8}
        machine = cluster("8xH100")
        lengths = Lengths.from_array(np.array([300] * 40 + [6000]))
        task = PlanTask(SPEC, machine, lengths, 1 << 14, "bf16", machine.devices, fixed={CONTEXT.name: (2,)})
        plans = shortlist(compare(Problem.of(task), task.budget_bytes))
        assert plans
        assert all(edge.use.degree(CONTEXT.name) == 2 and edge.use.world == 8 for plan in plans for edge in plan.edges)
