"""What `nccl.py` calls in its ranks."""

import faulthandler
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from trial import Trial, build, compare

from longshift.dist.collectives import Pending
from longshift.dist.world import World
from longshift.layout.box import Box
from longshift.layout.layout import Layout
from longshift.program.operations import Op
from longshift.step.update import train_step

NUMBERS = 1 << 18  # of a message: 1 MiB in float32, which no library sends ahead


def join(world: World) -> None:
    """Meet the other ranks."""
    world.gather_text("")


def watched(world: World, name: str, stacks: str, stack_s: float, **arguments: Any) -> Any:
    """What a function of this module returns; where each thread stands goes to a file of the folder `stacks` after `stack_s`."""
    with (Path(stacks) / f"{world.rank}.stack").open("w") as file:
        faulthandler.dump_traceback_later(stack_s, file=file)
        try:
            return globals()[name](world, **arguments)
        finally:
            faulthandler.cancel_dump_traceback_later()


def collective(world: World, kind: str) -> dict[str, float]:
    """The largest difference of what a collective brought to what it has to bring, small integers in float32."""
    pairs = list(globals()[kind](world))
    assert pairs
    differences = [float((arrived - expected).abs().max()) for arrived, expected in pairs if expected.numel()]
    return {"difference": max(differences), "messages": len(pairs)}


def numbers(world: World, source: int, target: int = 0, size: int = NUMBERS) -> Tensor:
    """What rank `source` has for rank `target`: no two ranks have the same."""
    return torch.arange(size, dtype=torch.float32, device=world.device) % 1000 + 5000 * source + 1000 * target


def total(world: World, target: int = 0) -> Tensor:
    return torch.stack([numbers(world, source, target) for source in range(world.size)]).sum(0)


def all_reduce(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    x = numbers(world, world.rank)
    world.everyone.start_all_reduce(x).wait()
    yield x, total(world)
    yield world.everyone.all_reduce(numbers(world, world.rank)), total(world)


def reduce_scatter(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    x = torch.stack([numbers(world, world.rank, target) for target in range(world.size)])
    out = torch.empty_like(x[0])
    world.everyone.reduce_scatter(out, x).wait()
    yield out, total(world, world.rank)


def all_gather(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    expected = torch.stack([numbers(world, source) for source in range(world.size)])
    out = torch.empty_like(expected)
    world.everyone.all_gather(out, numbers(world, world.rank)).wait()
    yield out, expected


def send_both_ways(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    """As the stages of a pipeline do: a group for each direction, whose pairs have met; what is received is asked for first."""
    ranks = tuple(range(world.size))
    pending: list[Pending] = []
    arrived = []
    for purpose, step in (("forward", 1), ("backward", -1)):
        world.prepare([ranks], purpose)
        group = world.group(ranks, purpose)
        group.meet(world.device)
        source, target = world.rank - step, world.rank + step
        if source in ranks:
            arrived.append((torch.empty(NUMBERS, device=world.device), numbers(world, source, world.rank)))
            pending.append(group.receive(arrived[-1][0], source, tag=1))
        if target in ranks:
            pending.append(group.send(numbers(world, world.rank, target), target, tag=1))
    for each in pending:
        each.wait()
    yield from arrived


def uneven_exchanges(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of other sizes for each pair: some empty, all that a rank sends, all that it receives, all of all ranks."""
    ranks = range(world.size)
    ways = (
        lambda source, target: 1000 * source + 7 * target,
        lambda source, target: 1000 * (source == 0),
        lambda source, target: 1000 * (target == 0),
        lambda source, target: 0,
        lambda source, target: NUMBERS,
    )
    for size in ways:
        sends = [numbers(world, world.rank, target, size(world.rank, target)) for target in ranks]
        pending, received = world.everyone.exchange(sends, [(size(source, world.rank),) for source in ranks])
        pending.wait()
        yield from ((received[source], numbers(world, source, world.rank, size(source, world.rank))) for source in ranks)


def two_groups(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    """Collectives of two groups of the same ranks under way at once; the one that began last is waited for first."""
    ranks = tuple(range(world.size))
    for purpose in ("gather", "reduce"):
        world.prepare([ranks], purpose)
    for _ in range(5):
        x = numbers(world, world.rank)
        gathered = x.new_empty((world.size, NUMBERS))
        reducing = world.group(ranks, "reduce").start_all_reduce(x)
        gathering = world.group(ranks, "gather").all_gather(gathered, numbers(world, world.rank))
        gathering.wait()
        reducing.wait()
        yield x, total(world)
        yield gathered.sum(0), total(world)


def layout(world: World, **arguments: Any) -> dict[str, float]:
    """Worst relative differences of a layout to the truth: `trial.compare`."""
    return compare(world, **arguments)


def write_truth(world: World, trial: dict, path: str) -> float:
    """Train a trial in this process alone, and write what `trainer.check.Comparison` compares with. The last loss."""
    what = Trial.from_json(trial)
    state, player = build(what, [Layout()], world)
    case = what.case
    truth: dict[str, Tensor] = {}

    def keep(kind: str, name: str, box: Box, view: Tensor) -> None:
        shape = what.spec.by_name[name].shape
        weight = truth.setdefault(f"{kind}/{name}", torch.zeros(shape))
        weight[box.within(Box.whole(shape))] = view.float().cpu()

    def keep_gradients(op: Op) -> None:
        for kind in case.gradient_kinds(len(losses)) if op.kind == "norm" else ():
            for shard in state.home.learning:
                for name, box, view in shard.views(state.home.flat(shard, "grad")):
                    keep(kind, name, box, view)

    losses: list[float] = []
    player.after = keep_gradients
    for batch in case.batches:
        losses.append(train_step(state, batch, player, leave=True).loss)
    player.after = None
    player.finish()
    for name, box, _, views in state.optimizer.state():
        for kind, view in views.items():
            keep(kind, name, box, view)
    save_file(truth | {"loss": torch.tensor(losses, dtype=torch.float64)}, path)
    return losses[-1]
