"""What forked ranks do for test_streamed.py and test_boundaries.py."""

import json
import weakref
from dataclasses import asdict

import pytest
from test_precision import bits
from torch import Tensor
from trial import Trial, build

from longshift.dist.world import World
from longshift.layout.layout import Layout
from longshift.program.operations import Op
from longshift.step.player import Player
from longshift.step.update import train_step
from longshift.weigh.allocations import RankMemory
from longshift.weigh.ledger import Ledger


def foreseen(player: Player, trial: Trial, lengths: list[int]) -> dict[str, int]:
    """What the ledger says that this rank's tier does in a step of documents of these lengths, under the names of `BytesMoved`."""
    visits, packs = player.steps.visits(player.groups(lengths), lengths)
    ledger = Ledger(RankMemory(player.steps, "gloo", trial.precision in ("float32", "float64")))
    found = ledger.play(visits, [[[lengths[d] for d in pack] for pack in some] for some in packs])
    return {"peak_bytes": found.peaks["disk"].total, "put_bytes": found.moved["put"], "fetched_bytes": found.moved["fetched"]}


def moved_and_predicted(world: World, trial: dict, layout: str) -> tuple[dict, dict]:
    """What this rank's tier did in a step of one document, and what the ledger says of it."""
    what = Trial.from_json(trial)
    state, player = build(what, [Layout.parse(layout)], world)
    (runner,), (batch,) = player.runners.values(), what.batches()
    assert runner.tier is not None
    train_step(state, batch, player)
    world.forget()
    return asdict(runner.tier.moved), foreseen(player, what, list(what.lengths[0]))


def pipelined(world: World, trial: dict, layout: str) -> tuple[int, bool]:
    """A step. The most tensors that this rank had given away to be sent and were alive at one time, and whether what arrived was what had
    been sent."""
    what = Trial.from_json(trial)
    state, player = build(what, [Layout.parse(layout)], world)
    (runner,), (batch,) = player.runners.values(), what.batches()
    given: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most, sent, arrived = 0, {}, {}
    to_send, received, send = runner.to_send, runner.received, player.table["send"]

    def key(op: Op) -> str:
        return f"{op.micro} {op.turn} {op.number}"

    def giving(op: Op) -> Tensor:
        out = to_send(op)
        sent[key(op)] = bits(out)
        given.add(out)
        return out

    def sending(op: Op) -> None:
        nonlocal most
        send(op)
        most = max(most, len(given))

    def taking(op: Op, x: Tensor) -> None:
        arrived[key(op)] = bits(x)
        received(op, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "to_send", giving)
        patch.setattr(runner, "received", taking)
        patch.setitem(player.table, "send", sending)
        train_step(state, batch, player)
    every = [json.loads(text) for text in world.gather_text(json.dumps([sent, arrived]))]
    world.forget()
    all_sent, all_arrived = ({key: value for rank in every for key, value in rank[which].items()} for which in (0, 1))
    messages = 2 * len(player.packs) * (runner.layout.pp * runner.layout.virtual - 1)
    return most, all_sent == all_arrived and len(all_sent) == messages
