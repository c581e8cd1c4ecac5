"""Metrics of a step, gathered from all ranks. Every function that takes a world or a player is
collective: all ranks call it, in the same order."""

import resource
import sys
from typing import NamedTuple

import torch
import torch.distributed as dist

from longshift.config import Config
from longshift.config_parts import layout_out
from longshift.dist.world import World
from longshift.documents.batch import StepBatch
from longshift.state.home import Home
from longshift.step.player import GroupVisit, Player
from longshift.step.update import Outcome
from longshift.stream.tiers import BytesMoved
from longshift.trainer.metrics import GroupMetrics, HomeMetrics, StepMetrics


class RankStatus(NamedTuple):
    """What ranks tell each other at the end of a step.

    `memory_bytes`: the peak so far of the fullest rank.
    `stop_requested`: whether any rank was asked to stop.
    `is_saving`: whether any rank still writes a checkpoint.
    """

    memory_bytes: int
    stop_requested: bool
    is_saving: bool


class _VisitTotals(NamedTuple):
    """What was measured in one group of a step: on this rank, summed over ranks, or the maximum."""

    seconds: float
    switch_exposed_s: float
    switch_hidden_s: float
    waited_s: float
    copying_s: float
    put_bytes: float
    fetched_bytes: float
    peak_bytes: float


def make_step_metrics(
    config: Config,
    step: int,
    batch: StepBatch,
    outcome: Outcome,
    seconds: float,
    memory_bytes: int,
) -> StepMetrics:
    """Metrics of a step that are known on every rank."""
    tokens = batch.tokens
    pairs = sum(float(config.spec.attended(len(doc.ids))) for doc in batch.documents)
    flops = tokens * config.spec.flops_per_token(pairs / tokens)
    return StepMetrics(
        step=step,
        loss=outcome.loss,
        grad_norm=outcome.grad_norm,
        lr=outcome.lr,
        tokens=tokens,
        target_tokens=batch.target_tokens,
        documents=len(batch.documents),
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        model_flops_per_s=flops / seconds,
        memory_bytes=memory_bytes,
        cursor=batch.next_cursor,
        skipped=outcome.skipped,
        layout=layout_out(config.layout),
    )


def gather_status(world: World, stop_requested: bool, is_saving: bool) -> RankStatus:
    """Tell the other ranks the status of this one, and return that of all."""
    # One collective for three answers: the largest of yes and no is yes.
    status = [_peak_memory_bytes(world), int(stop_requested), int(is_saving)]
    status = torch.tensor(status, device=world.device)
    memory_bytes, any_stop, any_saving = world.everyone.all_reduce(
        status, dist.ReduceOp.MAX
    ).tolist()
    return RankStatus(memory_bytes, bool(any_stop), bool(any_saving))


def _peak_memory_bytes(world: World) -> int:
    """Peak memory so far: allocated on a GPU, resident on a CPU."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, Linux KiB.
    bytes_per_unit = 1 if sys.platform == "darwin" else 1024
    return resident * bytes_per_unit


def gather_group_metrics(player: Player) -> tuple[GroupMetrics, ...]:
    """Metrics of the groups of the last step.

    None for a single layout that neither streams nor offloads: the step's own metrics say it all.
    """
    has_tier = any(runner.tier is not None for runner in player.runners.values())
    if len(player.edges) == 1 and not has_tier:
        return ()

    everyone = player.world.everyone
    rows = [_visit_totals(visit) for visit in player.visited]
    totals = torch.tensor(rows, dtype=torch.float64, device=player.world.device)
    # An all-reduce changes its tensor in place, and the sum needs the values again.
    maxima = everyone.all_reduce(totals.clone(), dist.ReduceOp.MAX).tolist()
    sums = everyone.all_reduce(totals).tolist()
    return tuple(
        _group_metrics(player, visit, maximum=_VisitTotals(*maximum), total=_VisitTotals(*total))
        for visit, maximum, total in zip(player.visited, maxima, sums)
    )


def _visit_totals(visit: GroupVisit) -> _VisitTotals:
    """What this rank measured in a group. Without a tier, nothing was copied."""
    copies = visit.moved or BytesMoved()
    return _VisitTotals(
        seconds=visit.seconds,
        switch_exposed_s=visit.exposed_s,
        switch_hidden_s=visit.hidden_s,
        waited_s=copies.waited_s,
        copying_s=copies.copying_s,
        put_bytes=copies.put_bytes,
        fetched_bytes=copies.fetched_bytes,
        peak_bytes=copies.peak_bytes,
    )


def _group_metrics(
    player: Player, visit: GroupVisit, maximum: _VisitTotals, total: _VisitTotals
) -> GroupMetrics:
    """Metrics of a group. Seconds are those of the slowest rank, bytes those of all."""
    group = visit.group
    tier = player.runners[group.layout].tier
    waited_s = hidden_share = None
    if tier is not None and tier.timed:
        waited_s = maximum.waited_s
        if total.copying_s:
            hidden_share = max(0.0, 1 - total.waited_s / total.copying_s)
    return GroupMetrics(
        layout=str(group.layout),
        upto=group.hi,
        documents=len(group.documents),
        packs=len(group.packs),
        tokens=visit.tokens,
        balance=group.balance,
        seconds=maximum.seconds,
        tokens_per_s=visit.tokens / maximum.seconds,
        switch_exposed_s=maximum.switch_exposed_s,
        switch_hidden_s=maximum.switch_hidden_s,
        intra_node_bytes=visit.intra_node_bytes,
        inter_node_bytes=visit.inter_node_bytes,
        put_bytes=int(total.put_bytes),
        fetched_bytes=int(total.fetched_bytes),
        waited_s=waited_s,
        hidden_share=hidden_share,
        tier_peak_bytes=int(maximum.peak_bytes),
    )


def gather_home_metrics(home: Home, world: World) -> HomeMetrics | None:
    """What moved between memory and disk since the last step; None without a state on disk."""
    if home.records is None:
        return None
    moved = home.records.moved
    counts = [moved.fetched_bytes, moved.put_bytes, moved.waited_s]
    counts = torch.tensor(counts, dtype=torch.float64, device=world.device)
    moved.restart()
    waited_s = float(world.everyone.all_reduce(counts[2].clone(), dist.ReduceOp.MAX))
    read_bytes, written_bytes, _ = world.everyone.all_reduce(counts).tolist()
    return HomeMetrics(int(read_bytes), int(written_bytes), waited_s)
