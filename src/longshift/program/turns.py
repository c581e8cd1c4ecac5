"""What a length group computes on one rank, in order, as turns: forward and backward of every
micro-batch, messages between stages, what goes to tiers, where gradients are summed. Without
gathers and waits for reductions, which `program.step` puts around them.

    vertical   F1 F1 F1 │ F2 F2 F2 │ loss loss loss │ B2 B2 B2 │ B1 B1 B1
               units in turn, each for three micro-batches

In vertical order (GreedySnake, arXiv 2512.17570) a unit's weights come once for a forward and once
for a backward, and its gradients go once, however many micro-batches there are. What waits between
units is the residual stream of every micro-batch. So it is for weights that come from far: ZeRO-3
with several packs, a home on disk.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from longshift.layout.layout import Layout
from longshift.layout.loss_rows import loss_blocks
from longshift.layout.placement import boxes_on, moving_unit
from longshift.program.operations import Kind, Op
from longshift.schedule import pipeline
from longshift.schedule.sequence import pack_order
from longshift.schedule.unit_events import backward_turns, forward_turns
from longshift.spec.model import ModelSpec
from longshift.switch.itinerary import Cut


@dataclass(frozen=True)
class Visit:
    """A length group as the program needs it. `micros`: micro-batches of each replica.
    `loss_blocks`: into how many blocks of rows the loss of each is cut; empty in chunked layouts,
    where events say so."""

    layout: Layout
    micros: int
    loss_blocks: tuple[int, ...] = ()


def visit_of(spec: ModelSpec, layout: Layout, packs: Sequence[Sequence[int]]) -> Visit:
    """A group whose micro-batches have documents of these lengths. An empty pack is one token
    without a target."""
    # Events of a chunked layout cut the loss of each chunk.
    if layout.chunk:
        return Visit(layout, len(packs))

    # Packs of equal lengths are laid out once.
    blocks_by_pack = {}
    for pack in set(map(tuple, packs)):
        order = pack_order(layout, pack)
        rows = order.local_tokens // layout.contiguous_ranks
        blocks_by_pack[pack] = loss_blocks(spec, rows)
    blocks = tuple(blocks_by_pack[tuple(pack)] for pack in packs)
    return Visit(layout, len(packs), blocks)


class RankLayout:
    """A layout from one rank: which units it computes, which weights it has,
    how they come. Immutable."""

    def __init__(self, spec: ModelSpec, layout: Layout, cut: Cut, rank: int):
        self.spec = spec
        self.layout = layout
        self.cut = cut
        self.at = layout.coord(rank)
        self.chunks = layout.units_of(spec.layers, self.at.pp)
        # Llama's embedding has no weights of its own when it is tied.
        self.units = frozenset(boxes_on(spec, layout, rank))
        self.learned = self.units & {
            moving_unit(spec, param) for param in spec.params if not param.frozen
        }
        # The tied embedding moves as a unit of its own, after all others.
        self.tied = (spec.units,) if spec.units in self.units else ()

        # Weights come and sums go by collectives among holders.
        self.collective = cut.at_home or cut.side == "rows"

    @property
    def leads(self) -> bool:
        """Whether no other stage waits for this rank's last backward. [Note: order]"""
        return self.at.pp == 0

    def learning(self, unit: int) -> tuple[int, ...]:
        """The moving units with trained weights that `unit` uses on this rank: the tied embedding,
        its own."""
        tied = self.tied if unit in (0, self.spec.layers + 1) else ()
        return tuple(moving for moving in (*tied, unit) if moving in self.learned)


@dataclass(frozen=True)
class UnitTurn:
    """Consecutive operations that compute with the weights of one unit (-1: with none). `final`: of
    the rank's last backward."""

    unit: int
    ops: tuple[Op, ...]
    final: bool = False


def turns(
    view: RankLayout, visit: Visit, number: int, closing: bool, learns: bool = True
) -> Iterator[UnitTurn]:
    """All that a group computes on a rank, messages between stages included, without gathers. Where
    it does not learn, the forwards alone: in the order of a step that learns they wait for none but
    each other.

    `number`: of the visit. `closing`: whether this is the last group of the step that adds to these
    gradient sums."""
    layout = view.layout
    maker = (_ChunkedTurns if layout.chunk else _WholeTurns)(view, visit, number, closing, learns)
    if layout.order == "vertical" and learns:
        assert isinstance(maker, _WholeTurns)
        yield from maker.vertical()
        return

    # 1. The events of this stage.
    passes = pipeline.stage_passes(layout, view.at.pp, visit.micros)
    events = [event for event in passes if learns or event.kind == "forward"]
    messages = _StageMessages(view, number, events)
    last_event = {event.micro: index for index, event in enumerate(events)}
    unawaited_sends: deque[Op] = deque()

    # 2. A receive is posted before the event ahead of its own; a send is awaited when as many
    # others as stages have followed.
    first_receive = messages.receive(0)
    for index, event in enumerate(events):
        posts = [*messages.load(event.micro), *messages.receive(index + 1)]
        awaits = messages.message("await receive", index)
        sends = messages.message("send", index)
        yield UnitTurn(-1, (*(first_receive if index == 0 else ()), *posts, *awaits))

        units = view.chunks[event.chunk]
        if event.kind == "forward":
            unit_turns = list(maker.forward(event.chunk, event.micro))
        else:
            unit_turns = list(maker.backward(event.chunk, event.micro))
            units = units[::-1]
        if layout.chunk and awaits:
            arrive = Op("arrive", number, units[0], event.micro, event.chunk, event.kind)
            unit_turns.insert(0, UnitTurn(-1, (arrive,)))
        if layout.chunk and sends:
            depart = Op("depart", number, units[-1], event.micro, event.chunk, event.kind)
            unit_turns.append(UnitTurn(-1, (depart,)))
        if learns and index == len(events) - 1:
            unit_turns = [replace(turn, final=True) for turn in unit_turns]
        yield from unit_turns

        ops = list(sends)
        unawaited_sends.extend(op._replace(kind="await send") for op in sends)
        if len(unawaited_sends) > layout.pp:
            ops.append(unawaited_sends.popleft())
        if last_event[event.micro] == index:
            ops.append(Op("unload", number, micro=event.micro))
        yield UnitTurn(-1, tuple(ops))
    yield UnitTurn(-1, tuple(unawaited_sends))


class _StageMessages:
    """Operations that load the packs of a stage's events, and send between stages. Mutable: what is
    loaded. `number`: of the visit."""

    def __init__(self, view: RankLayout, number: int, events: Sequence[pipeline.StagePass]):
        self.layout = view.layout
        self.stage = view.at.pp
        self.number = number
        self.events = events
        self.loaded: set[int] = set()

    def load(self, micro: int) -> list[Op]:
        """The operation that loads a micro-batch, once."""
        if micro in self.loaded:
            return []
        self.loaded.add(micro)
        return [Op("load", self.number, micro=micro)]

    def receive(self, index: int) -> list[Op]:
        """Operations that post what an event waits for, none after the last one."""
        message = self.message("receive", index) if index < len(self.events) else []
        return [*self.load(self.events[index].micro), *message] if message else []

    def message(self, kind: Literal["receive", "await receive", "send"], index: int) -> list[Op]:
        """The operation that posts or awaits what an event receives, or that posts what it sends,
        if there is such a message."""
        event = self.events[index]
        sends_or_receives = pipeline.sends if kind == "send" else pipeline.receives
        transfer = sends_or_receives(self.layout, self.stage, event)
        if transfer is None:
            return []
        # An interleaved pipeline counts stages of all model chunks; ranks repeat every `pp` of
        # them.
        source = transfer.source % self.layout.pp
        target = transfer.target % self.layout.pp
        message = Op(
            kind,
            self.number,
            micro=event.micro,
            chunk=event.chunk,
            turn=event.kind,
            number=transfer.tag,
            peer=target if kind == "send" else source,
            way="rising" if source < target else "falling",
        )
        return [message]


@dataclass(frozen=True, eq=False)
class _Turns:
    """Turns of packs, whole or chunked: what they have in common is where gradients go."""

    view: RankLayout
    visit: Visit
    number: int
    closing: bool
    learns: bool

    def reduce(self, unit: int, micro: int) -> Iterator[Op]:
        """The operation that brings sums home after a backward of a unit on this micro-batch, where
        they go then."""
        layout = self.view.layout
        # In vertical order the micro-batches of a unit follow each other, so one reduction serves
        # all.
        if micro == self.visit.micros - 1:
            is_due = self.closing or layout.zero >= 2
        else:
            is_due = layout.zero >= 2 and layout.order != "vertical"
        has_holders = unit in self.view.learned and self.view.collective
        if is_due and has_holders:
            yield Op("reduce", self.number, unit)


class _WholeTurns(_Turns):
    """Turns of packs that are computed whole."""

    @cached_property
    def recomputed(self) -> set[int]:
        """Blocks whose forward keeps no graph for the backward (arXiv 1604.06174)."""
        # The backward of the last blocks comes first, so these are kept. What recompute selective
        # (2205.05198) computes again, it does inside the backward: see `model.attention`.
        view = self.view
        recomputed = set[int]()
        if view.layout.recompute == "full" and self.learns:
            for chunk in view.chunks:
                blocks = [unit for unit in chunk if 1 <= unit <= view.spec.layers]
                num_recomputed = max(0, len(blocks) - view.layout.kept_blocks)
                recomputed.update(blocks[:num_recomputed])
        return recomputed

    def forward(self, chunk: int, *micros: int) -> Iterator[UnitTurn]:
        """Turns of forwards of micro-batches. That of the head is part of its loss, which is here
        where nothing is learned."""
        for unit in self.view.chunks[chunk]:
            is_head = unit > self.view.spec.layers
            if is_head and self.learns:
                continue
            make_ops = self._loss if is_head else self._forward
            ops = (op for micro in micros for op in make_ops(unit, micro))
            yield UnitTurn(unit, tuple(ops))

    def backward(self, chunk: int, *micros: int) -> Iterator[UnitTurn]:
        """Turns of backwards of micro-batches. What waits in a tier is fetched one unit, or
        micro-batch, ahead."""
        # One fetch goes ahead, so that it crosses the link while another unit is computed.
        units = self.view.chunks[chunk][::-1]

        fetches = deque(self._moves("fetch", unit, micro) for unit in units for micro in micros)
        fetches.append([])
        ops = fetches.popleft()

        # Operations of all micro-batches of a unit are one turn.
        for unit in units:
            make_ops = self._loss if unit > self.view.spec.layers else self._backward
            for micro in micros:
                ops += fetches.popleft()
                ops += make_ops(unit, micro)
            yield UnitTurn(unit, tuple(ops))
            ops = []

    def vertical(self) -> Iterator[UnitTurn]:
        """Turns of all micro-batches, each unit's together."""
        micros = range(self.visit.micros)
        yield UnitTurn(-1, tuple(Op("load", self.number, micro=micro) for micro in micros))
        yield from self.forward(0, *micros)
        yield from (replace(turn, final=True) for turn in self.backward(0, *micros))
        yield UnitTurn(-1, tuple(Op("unload", self.number, micro=micro) for micro in micros))

    def _loss(self, unit: int, micro: int) -> Iterator[Op]:
        """Loss of the head, and its gradient where it learns, a block of rows after another."""
        turn = "loss" if self.learns else "score"
        for block in range(self.visit.loss_blocks[micro]):
            yield Op("compute", self.number, unit, micro, turn=turn, number=block)
            # Gradients of a block are added up before the next block leaves its own.
            if self.learns:
                yield from self._accumulate(unit)
        if self.learns:
            yield from self.reduce(unit, micro)

    def _accumulate(self, unit: int) -> Iterator[Op]:
        """Operations that add the gradients which a backward of `unit` left to their sums."""
        return (Op("accumulate", self.number, moving) for moving in self.view.learning(unit))

    def _op(self, kind: Kind, unit: int, micro: int, turn: str = "") -> Op:
        # Unit 0 is the embedding.
        part = "block with output" if unit in self.recomputed else "block" if unit else "embed"
        return Op(kind, self.number, unit, micro, turn=turn, part=part)

    def _moves(self, kind: Kind, unit: int, micro: int) -> list[Op]:
        """The operation that moves what waits for a backward to its tier or from there, if it waits
        in one."""
        is_near = self.view.layout.offload == "device"
        return [] if is_near or unit not in self.recomputed else [self._op(kind, unit, micro)]

    def _forward(self, unit: int, micro: int) -> Iterator[Op]:
        """The forward of a unit on a micro-batch; what waits for a backward goes to its tier."""
        turn = "forward" if self.learns else "pass on"
        yield self._op("compute", unit, micro, "pass" if unit in self.recomputed else turn)
        yield from self._moves("put", unit, micro)

    def _backward(self, unit: int, micro: int) -> Iterator[Op]:
        """The backward of a unit on a micro-batch, with the forward again
        where it kept no graph."""
        yield from self._moves("await fetch", unit, micro)
        if unit in self.recomputed:
            yield self._op("compute", unit, micro, "again")
        yield self._op("compute", unit, micro, "backward")
        yield from self._moves("drop", unit, micro)
        yield from self._accumulate(unit)
        yield from self.reduce(unit, micro)


class _ChunkedTurns(_Turns):
    """Turns of packs that are computed chunk by chunk. Their events add gradients to sums
    as they come."""

    def forward(self, chunk: int, micro: int) -> Iterator[UnitTurn]:
        """Turns of a forward."""
        layers = self.view.spec.layers
        units = self.view.chunks[chunk]
        for unit, turn in forward_turns(units, layers, self.view.layout.every, self.learns):
            yield UnitTurn(unit, (Op("compute", self.number, unit, micro, chunk, turn),))

    def backward(self, chunk: int, micro: int) -> Iterator[UnitTurn]:
        """Turns of a backward, with forwards again where these kept too little."""
        layers = self.view.spec.layers
        units = self.view.chunks[chunk]
        for unit, turn in backward_turns(units, layers, self.view.layout.every):
            ops = [Op("compute", self.number, unit, micro, turn=turn)]
            # A forward that is played again leaves no gradients.
            if turn != "forward":
                ops += self.reduce(unit, micro)
            yield UnitTurn(unit, tuple(ops))
