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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from longshift.layout.layout import Layout
from longshift.layout.loss_rows import loss_blocks
from longshift.layout.placement import boxes_on, moving_unit
from longshift.program.operations import Kind, Op
from longshift.schedule import pipeline
from longshift.schedule.sequence import pack_order
from longshift.schedule.unit_events import backward_turns, forward_turns
from longshift.spec.model import ModelSpec, Param
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
    if layout.chunk:
        return Visit(layout, len(packs))
    blocks_by_pack = {}
    for pack in set(map(tuple, packs)):
        order = pack_order(layout, pack)
        blocks_by_pack[pack] = loss_blocks(spec, order.local_tokens // layout.contiguous_ranks)
    return Visit(layout, len(packs), tuple(blocks_by_pack[tuple(pack)] for pack in packs))


class RankLayout:
    """A layout from one rank: which units it computes, which weights it has,
    how they come. Immutable."""

    def __init__(self, spec: ModelSpec, layout: Layout, cut: Cut, rank: int):
        self.spec = spec
        self.layout = layout
        self.cut = cut
        self.at = layout.coord(rank)
        self.chunks = layout.units_of(spec.layers, self.at.pp)
        self.units = frozenset(boxes_on(spec, layout, rank))
        self.learned = self.units & {
            moving_unit(spec, param) for param in spec.params if not param.frozen
        }
        self.tied = (spec.units,) if spec.units in self.units else ()
        # Weights come and sums go by collectives among holders.
        self.collective = cut.at_home or cut.side == "rows"

    @cached_property
    def kept(self) -> frozenset[int]:
        """Blocks that keep all for their backward, whatever the others do: the last of each model
        chunk, whose backward comes first."""
        last_blocks: set[int] = set()
        for chunk in self.chunks:
            blocks = [unit for unit in chunk if 1 <= unit <= self.spec.layers]
            last_blocks.update(blocks[max(0, len(blocks) - self.layout.kept_blocks) :])
        return frozenset(last_blocks)

    @property
    def leads(self) -> bool:
        """Whether no other stage waits for this rank's last backward. [Note: order]"""
        return self.at.pp == 0

    @cached_property
    def elements(self) -> dict[int, int]:
        """Nominal elements of each moving unit on a rank. [Note: windows]"""
        return self._nominal(self.spec.params)

    @cached_property
    def learned_elements(self) -> dict[int, int]:
        """As `elements`, of the weights that are trained."""
        return self._nominal(param for param in self.spec.params if not param.frozen)

    def _nominal(self, params: Iterable[Param]) -> dict[int, int]:
        elements = dict.fromkeys(range(self.spec.units + 1), 0)
        for param in params:
            slices = self.layout.weight_ranks if param.dim is not None else 1
            elements[moving_unit(self.spec, param)] += -(-param.elements // slices)
        return elements

    def has_weights(self, unit: int) -> bool:
        """Whether a unit has weights of its own on this rank.
        Llama's embedding has none when it is tied."""
        return unit in self.units

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
    if layout.order == "vertical" and learns:
        yield from _WholeTurns(view, visit, number, closing).vertical()
        return
    make_turns = ((_ChunkedTurns if layout.chunk else _WholeTurns) if learns else _ScoringTurns)(
        view, visit, number, closing
    )

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
        awaits = messages.await_receive(index)
        yield UnitTurn(-1, (*(first_receive if index == 0 else ()), *posts, *awaits))
        unit_turns = (make_turns.forward if event.kind == "forward" else make_turns.backward)(
            event, bool(awaits)
        )
        is_final = learns and index == len(events) - 1
        yield from (replace(turn, final=True) for turn in unit_turns) if is_final else unit_turns
        ops = messages.send(index)
        unawaited_sends.extend(op._replace(kind="await send") for op in ops)
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
        self.receives = [pipeline.receives(self.layout, self.stage, event) for event in events]
        self.loaded: set[int] = set()

    def load(self, micro: int) -> list[Op]:
        """The operation that loads a micro-batch, once."""
        if micro in self.loaded:
            return []
        self.loaded.add(micro)
        return [Op("load", self.number, micro=micro)]

    def receive(self, index: int) -> list[Op]:
        """Operations that post what an event waits for, none after the last one."""
        if index == len(self.events) or self.receives[index] is None:
            return []
        load = self.load(self.events[index].micro)
        return [*load, *self._message("receive", index, self.receives[index])]

    def await_receive(self, index: int) -> list[Op]:
        """The operation that awaits what an event waits for, if it does."""
        return self._message("await receive", index, self.receives[index])

    def send(self, index: int) -> list[Op]:
        """The operation that sends what an event makes, if another stage needs it."""
        transfer = pipeline.sends(self.layout, self.stage, self.events[index])
        return self._message("send", index, transfer)

    def _message(self, kind: Kind, index: int, transfer: pipeline.Transfer | None) -> list[Op]:
        """The operation that posts or awaits what an event sends or receives, if it does."""
        if transfer is None:
            return []
        # An interleaved pipeline counts stages of all model chunks; ranks repeat every `pp` of
        # them.
        source = transfer.source % self.layout.pp
        target = transfer.target % self.layout.pp
        event = self.events[index]
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


class _Turns:
    """Turns of packs, whole or chunked: what they have in common is where gradients go."""

    def __init__(self, view: RankLayout, visit: Visit, number: int, closing: bool):
        self.view = view
        self.visit = visit
        self.number = number
        self.closing = closing

    def collect(self, unit: int, reduce: bool) -> Iterator[Op]:
        """Operations that add the gradients which a backward of `unit` left to their sums, and
        bring these home where `reduce`."""
        yield from (Op("accumulate", self.number, moving) for moving in self.view.learning(unit))
        if reduce and unit in self.view.learned and self.view.collective:
            yield Op("reduce", self.number, unit)

    def reduces(self, micro: int) -> bool:
        """Whether sums go home after a backward of this micro-batch."""
        layout = self.view.layout
        if micro == self.visit.micros - 1:
            return self.closing or layout.zero >= 2
        return layout.zero >= 2 and layout.order != "vertical"

    def forward(self, event: pipeline.StagePass, arrived: bool) -> Iterator[UnitTurn]:
        """Turns of a forward; `arrived`: what another stage computed goes before it."""
        raise NotImplementedError

    def backward(self, event: pipeline.StagePass, arrived: bool) -> Iterator[UnitTurn]:
        """Turns of a backward."""
        raise NotImplementedError


class _ScoringTurns(_Turns):
    """Turns of packs, whole or chunked, of which only the loss is wanted: nothing is kept."""

    def forward(self, event: pipeline.StagePass, arrived: bool) -> Iterator[UnitTurn]:
        micro = event.micro
        layers = self.view.spec.layers
        is_chunked = bool(self.view.layout.chunk)
        chunk = event.chunk if is_chunked else -1
        units = self.view.chunks[event.chunk]
        if is_chunked and arrived:
            yield UnitTurn(-1, (Op("arrive", self.number, units[0], micro, chunk, "forward"),))
        for unit in units:
            if unit > layers:
                blocks = (-1,) if is_chunked else range(self.visit.loss_blocks[micro])
                ops = (
                    Op("compute", self.number, unit, micro, chunk, "score", number=block)
                    for block in blocks
                )
                yield UnitTurn(unit, tuple(ops))
            else:
                turn = "embed" if is_chunked and unit == 0 else "pass on"
                part = "block" if unit else "embed"
                yield UnitTurn(unit, (Op("compute", self.number, unit, micro, chunk, turn, part),))
        if is_chunked and units[-1] <= layers:
            yield UnitTurn(-1, (Op("depart", self.number, units[-1], micro, chunk, "forward"),))


class _WholeTurns(_Turns):
    """Turns of packs that are computed whole."""

    def __init__(self, view: RankLayout, visit: Visit, number: int, closing: bool):
        super().__init__(view, visit, number, closing)
        self.moves = view.layout.offload != "device"
        self.kept = view.kept

    def forward(self, event: pipeline.StagePass, arrived: bool) -> Iterator[UnitTurn]:
        return self._forwards(event.chunk, (event.micro,))

    def backward(self, event: pipeline.StagePass, arrived: bool) -> Iterator[UnitTurn]:
        return self._backwards(event.chunk, (event.micro,))

    def vertical(self) -> Iterator[UnitTurn]:
        """Turns of all micro-batches, each unit's together."""
        micros = range(self.visit.micros)
        yield UnitTurn(-1, tuple(Op("load", self.number, micro=micro) for micro in micros))
        yield from self._forwards(0, micros)
        yield from (replace(turn, final=True) for turn in self._backwards(0, micros))
        yield UnitTurn(-1, tuple(Op("unload", self.number, micro=micro) for micro in micros))

    def _forwards(self, chunk: int, micros: Sequence[int]) -> Iterator[UnitTurn]:
        """Turns of the forwards of some micro-batches."""
        for unit in self.view.chunks[chunk]:
            if unit <= self.view.spec.layers:  # the head's forward is part of its loss
                yield UnitTurn(
                    unit, tuple(op for micro in micros for op in self._forward(unit, micro))
                )

    def _backwards(self, chunk: int, micros: Sequence[int]) -> Iterator[UnitTurn]:
        """Turns of the backwards of some micro-batches. What waits in a tier is fetched one unit,
        or micro-batch, ahead."""
        # One fetch goes ahead, so that it crosses the link while another unit is computed.
        units = self.view.chunks[chunk][::-1]
        fetches = iter(
            [*(tuple(self._fetches(unit, micro)) for unit in units for micro in micros), ()]
        )
        ops = list(next(fetches))
        for unit in units:
            for micro in micros:
                ops += next(fetches)
                ops += (
                    self._loss(unit, micro)
                    if unit > self.view.spec.layers
                    else self._backward(unit, micro)
                )
            yield UnitTurn(unit, tuple(ops))
            ops = []

    def _loss(self, unit: int, micro: int) -> Iterator[Op]:
        """Loss and gradient of the head, a block of rows after another."""
        num_blocks = self.visit.loss_blocks[micro]
        for block in range(num_blocks):
            yield Op("compute", self.number, unit, micro, turn="loss", number=block)
            yield from self.collect(unit, self.reduces(micro) and block == num_blocks - 1)

    def _recomputes(self, unit: int) -> bool:
        """Whether a unit's forward keeps no graph for its backward (arXiv 1604.06174). What
        recompute selective (2205.05198) computes again, it does inside the backward:
        see `model.attention`."""
        return (
            0 < unit <= self.view.spec.layers
            and self.view.layout.recompute == "full"
            and unit not in self.kept
        )

    def _op(self, kind: Kind, unit: int, micro: int, turn: str = "") -> Op:
        part = "embed" if unit == 0 else "block with output" if self._recomputes(unit) else "block"
        return Op(kind, self.number, unit, micro, turn=turn, part=part)

    def _forward(self, unit: int, micro: int) -> Iterator[Op]:
        """The forward of a unit on a micro-batch; what waits for a backward goes to its tier."""
        recomputes = self._recomputes(unit)
        yield self._op("compute", unit, micro, "pass" if recomputes else "forward")
        if self.moves and recomputes:
            yield self._op("put", unit, micro)

    def _fetches(self, unit: int, micro: int) -> Iterator[Op]:
        """Bring what waits for a backward back from its tier."""
        if self.moves and self._recomputes(unit):
            yield self._op("fetch", unit, micro)

    def _backward(self, unit: int, micro: int) -> Iterator[Op]:
        """The backward of a unit on a micro-batch, with the forward again
        where it kept no graph."""
        recomputes = self._recomputes(unit)
        if self.moves and recomputes:
            yield self._op("await fetch", unit, micro)
        if recomputes:
            yield self._op("compute", unit, micro, "again")
        yield self._op("compute", unit, micro, "backward")
        if self.moves and recomputes:
            yield self._op("drop", unit, micro)
        yield from self.collect(unit, self.reduces(micro))


class _ChunkedTurns(_Turns):
    """Turns of packs that are computed chunk by chunk. Their events add gradients to sums
    as they come."""

    def forward(self, event: pipeline.StagePass, arrived: bool) -> Iterator[UnitTurn]:
        view = self.view
        units = view.chunks[event.chunk]
        if arrived:
            yield UnitTurn(
                -1, (Op("arrive", self.number, units[0], event.micro, event.chunk, "forward"),)
            )
        for unit, turn in forward_turns(units, view.spec.layers, view.layout.every):
            if turn != "later":
                yield UnitTurn(
                    unit, (Op("compute", self.number, unit, event.micro, event.chunk, turn),)
                )
        if units[-1] <= view.spec.layers:
            yield UnitTurn(
                -1, (Op("depart", self.number, units[-1], event.micro, event.chunk, "forward"),)
            )

    def backward(self, event: pipeline.StagePass, arrived: bool) -> Iterator[UnitTurn]:
        view = self.view
        units = view.chunks[event.chunk]
        if arrived:
            yield UnitTurn(
                -1, (Op("arrive", self.number, units[-1], event.micro, event.chunk, "backward"),)
            )
        for unit, turn in backward_turns(units, view.spec.layers, view.layout.every):
            ops = [Op("compute", self.number, unit, event.micro, turn=turn)]
            if (
                turn != "forward"
                and self.reduces(event.micro)
                and unit in view.learned
                and view.collective
            ):
                ops.append(Op("reduce", self.number, unit))
            yield UnitTurn(unit, tuple(ops))
        if units[0]:
            yield UnitTurn(
                -1, (Op("depart", self.number, units[0], event.micro, event.chunk, "backward"),)
            )
