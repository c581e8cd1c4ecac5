"""Profiles of the turns of a unit on a whole pack: what each holds, keeps, sends and computes.

A turn is what the program calls `compute`. The modules, seams and runner functions that train are
played once, on one rank, on tensors without storage (`weigh.recorder`):

                                                      begins with       leaves
    pass       forward that keeps nothing             x                 y
               or, of "block with output",
               attention's result                     x                 y, o and log-sum-exp
    forward    forward that keeps its graph           x                 y, graph
               or, of "block with output",
               the second one                         x, o and lse      y, graph
    backward   of a kept graph                        x, y, dy, graph   dx, grads; graph is gone
    loss       head and cross-entropy of some rows,
               both ways                              x, dx             grads

What a turn begins with stays for as long as it runs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from longshift.dist.collectives import Pending
from longshift.documents.micro import Share, place_pack
from longshift.layout import axes
from longshift.layout.layout import Coord, Layout
from longshift.layout.loss_rows import loss_rows
from longshift.layout.placement import local_boxes, local_shape
from longshift.model.chosen_kernel import kernels
from longshift.model.cut import cut
from longshift.model.decoder import Block, Head, MicroBatch, Unit, build_unit
from longshift.model.functions import WRITTEN_OUT, add_product
from longshift.model.kernels import FLASH, FLASH_ON_CPU, Kernel
from longshift.model.packed_attention import EVEN, LONG
from longshift.schedule.sequence import TokenOrder
from longshift.spec.formats import adds_inside
from longshift.spec.model import ModelSpec
from longshift.step.compose import layout_ops
from longshift.step.runner import loss_of_rows
from longshift.weigh.meta_kernels import META
from longshift.weigh.recorder import RecordedGroup, Transport, TurnProfile, TurnRecorder

Part = Literal["embed", "block", "block with output", "attention half"]
Phase = Literal["pass", "forward", "backward"]

CollectiveName = Literal["all_gather", "reduce_scatter", "all_reduce", "sum"]

DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}  # by bytes


def layout_of(mesh: tuple[int, ...]) -> Layout:
    """The layout of a mesh alone."""
    return Layout().with_degrees(
        {axis.name: degree for axis, degree in zip(axes.token_axes(), mesh)}
    )


@dataclass(frozen=True)
class RankSetup:
    """A rank, and how it computes. `compute_bytes`: of an element of the compute format;
    `transport`: gloo with CPUs, NCCL with GPUs; `float8`: whether matmuls of blocks take factors of
    eight bits; `compiled`: whether each function of `model.functions` is one kernel, as
    `model.functions.compiled` makes it, whose memory is that of functions that are not.

    Of a layout only the axes that share tokens are kept, and recompute-selective: nothing else
    changes a turn. So layouts that differ elsewhere share their profiles."""

    spec: ModelSpec
    layout: Layout
    coord: Coord
    compute_bytes: int
    transport: Transport = "gloo"
    float8: bool = False
    compiled: bool = False

    def __post_init__(self) -> None:
        recompute = "selective" if self.layout.recompute == "selective" else "none"
        layout = replace(layout_of(self.layout.mesh), recompute=recompute)
        rank = self.layout.place(self.coord, axes.token_axes())
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "coord", layout.coord(rank))

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.compute_bytes]

    def rows(self, order: TokenOrder) -> int:
        """T': tokens of the residual stream on this rank, of a pack in this order."""
        return order.local_tokens // self.layout.contiguous_ranks


def unit_turn(
    setup: RankSetup, order: TokenOrder, part: Part, phase: Phase, block: int = 1
) -> TurnProfile:
    """Profile of one phase of a unit, or of half a block, on a pack in this order. `block`: the
    unit of one that computes so."""
    profiles = _unit_turns(setup, order, part, block, phase == "pass")
    return profiles[phase]


@lru_cache(maxsize=2048)
def _unit_turns(
    setup: RankSetup, order: TokenOrder, part: Part, block: int, is_pass: bool
) -> dict[Phase, TurnProfile]:
    player = rank_player(setup, order)
    if is_pass:
        return {"pass": player.play_pass(part, block)}
    # A backward needs its forward, so one play makes both profiles.
    return player.play(part, block)


@lru_cache(maxsize=1024)
def load_turn(setup: RankSetup, order: TokenOrder, has_angles: bool = True) -> TurnProfile:
    """Profile of making a pack's tokens, labels, positions and tables of angles; of a chunk, whose
    angles are made later, without these."""
    return RankPlayer(setup, order, has_angles).loaded


def loss_turn(setup: RankSetup, order: TokenOrder, number: int) -> TurnProfile:
    """Profile of the head and loss on the `number`-th block of rows of a pack or a chunk
    in this order."""
    total = setup.rows(order)
    rows = loss_rows(setup.spec, total)
    is_last = (number + 1) * rows >= total  # the last one may be shorter
    return _loss_turn(setup, order, (total - 1) // rows if is_last else 0)


@lru_cache(maxsize=1024)
def _loss_turn(setup: RankSetup, order: TokenOrder, number: int) -> TurnProfile:
    return rank_player(setup, order).play_loss(number)


@lru_cache(maxsize=64)
def rank_player(setup: RankSetup, order: TokenOrder) -> "RankPlayer":
    return RankPlayer(setup, order)


class RankPlayer:
    """A rank with one pack. Mutable: its recorder. `loaded`: the profile of making
    the pack's tensors."""

    def __init__(self, setup: RankSetup, order: TokenOrder, has_angles: bool = True):
        self.setup = setup
        self.order = order
        self.world_rank = setup.layout.rank(setup.coord)
        self.recorder = TurnRecorder(setup.transport)
        # The other ranks of this world are not there.
        world: Any = SimpleNamespace(rank=self.world_rank, group=self._group)
        kernel = self.recorder.count_calls(self._kernel())
        self.ops = layout_ops(setup.spec, setup.layout, world, kernel)
        with self.recorder.recording():
            self.micro = self._micro_batch(has_angles)
        self.loaded = self.recorder.profile(output=self.recorder.left_bytes)

    def _group(self, ranks: tuple[int, ...], purpose: str = "") -> RecordedGroup:
        return RecordedGroup(ranks, self.world_rank, purpose, self.recorder)

    def _kernel(self) -> Kernel:
        """What a run on this device takes, or what needs no less memory."""
        setup = self.setup
        if setup.transport == "gloo":
            return FLASH_ON_CPU
        kernel = kernels(torch.device("cuda"), setup.dtype)[0]
        return cut(kernel, FLASH, EVEN, LONG) if setup.compute_bytes == 2 else kernel

    def _micro_batch(self, has_angles: bool) -> MicroBatch:
        setup = self.setup
        layout = setup.layout
        tokens = self.order.local_tokens // layout.neighbor_ranks
        place = layout.place(setup.coord, axes.deal_axes("two-ended"))
        runs = self.order.runs[place]
        share = Share(
            tokens=torch.empty(tokens, dtype=torch.int64, device=META),
            labels=torch.empty(tokens, dtype=torch.int64, device=META),
            positions=torch.empty(tokens, dtype=torch.int64, device=META),
            ends=torch.empty(1 + len(runs), dtype=torch.int32, device=META),
            order=self.order,
        )
        return place_pack(setup.spec, share, layout, self.world_rank, setup.dtype, META, has_angles)

    def stream(self) -> Tensor:
        """This rank's share [T', D] of the residual stream."""
        return self.empty(self.setup.rows(self.order), self.setup.spec.width)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        with self.recorder:
            return torch.empty(shape, dtype=dtype or self.setup.dtype, device=META)

    def unit(self, unit: int) -> Unit:
        """The module of a unit with weights of this rank's shapes,
        and sums where matmuls add to them."""
        setup = self.setup
        spec = setup.spec
        by = self.recorder.fuse(WRITTEN_OUT) if setup.compiled else WRITTEN_OUT
        module = build_unit(spec, unit, by, setup.float8)
        sum_dtype = torch.promote_types(setup.dtype, torch.float32)
        on_gpu = setup.transport == "nccl"
        adds = adds_inside(setup.compute_bytes, sum_dtype.itemsize, on_gpu)
        summed = spec.multiplied[unit] if adds else ()
        # These sums are there before a turn, so that its profile counts none of them.
        for param in module.table:
            shape = local_shape(param, local_boxes(param, setup.layout, setup.coord))
            weight = self.empty(*shape)
            setattr(module, param.role, nn.Parameter(weight, not param.frozen))
            if param.name in summed:
                total = self.empty(1, *shape, dtype=sum_dtype)
                module.adds[param.role] = partial(add_product, total, first=False)
        return module

    def play_pass(self, part: Part, block: int) -> TurnProfile:
        """Play the forward of a unit that keeps no graph."""
        function = self._function(part, block)
        x = self._input(part)
        ops = self.ops.keeping([]) if part == "block with output" else self.ops
        with self.recorder.recording(), torch.no_grad():
            y = function(x, self.micro, ops)
        return self.recorder.profile_result(_bytes(y))

    def play(self, part: Part, block: int) -> dict[Phase, TurnProfile]:
        """Play a forward of a unit that keeps its graph, the first or another one,
        and the backward."""
        function = self._function(part, block)
        x = self._input(part)
        ops = self.ops
        if part == "block with output":
            ops = ops.keeping(self._attention_output(block))

        # 1. Forward.
        with self.recorder.recording():
            y = function(x, self.micro, ops)
        forward = self.recorder.profile_result(_bytes(y))

        # 2. Backward. The list of what attention kept lives as long as its graph.
        dy = self.stream()
        with self.recorder.recording():
            if y.requires_grad:
                torch.autograd.backward(y, dy)
        dx_bytes = 0 if x is None else _bytes(x.grad)
        unit: Any = getattr(function, "__self__", function)  # of a half
        backward = self.recorder.profile(output=dx_bytes, grads=gradient_bytes(unit))
        return {"forward": forward, "backward": backward}

    def _function(self, part: Part, block: int) -> Callable[..., Tensor]:
        module = self.unit(0 if part == "embed" else block)
        if isinstance(module, Block) and part == "attention half":
            return module.attention_half
        return module

    def _input(self, part: Part) -> Tensor | None:
        return None if part == "embed" else self.stream().requires_grad_()

    def _attention_output(self, block: int) -> list[Tensor]:
        """Output and log-sum-exp of attention, as a pass has left them."""
        output: list[Tensor] = []
        function = self._function("attention half", block)
        x = self._input("attention half")
        with self.recorder, torch.no_grad():
            function(x, self.micro, self.ops.keeping(output))
        return output

    def play_loss(self, number: int) -> TurnProfile:
        """Play the head and the loss on the `number`-th block of rows."""
        head = self.unit(self.setup.spec.layers + 1)
        assert isinstance(head, Head)
        # The gradient of x is made before: all blocks of rows write to it.
        x = self.stream()
        dx = self.stream()
        with self.recorder.recording():
            loss_of_rows(head, x, dx, self.micro, self.ops, number, seed=1.0)
        return self.recorder.profile(grads=gradient_bytes(head))


class CollectiveTurn(NamedTuple):
    """Profiles of a collective's begin and of the wait for its end.

    The `output` of the begin is where it ends, its `graph` what it holds until then, besides what
    there was before.
    """

    begin: TurnProfile
    end: TurnProfile


@lru_cache(maxsize=4096)
def play_collective(
    transport: Transport,
    purpose: str,
    operation: CollectiveName,
    holders: int,
    elements: int,
    item_bytes: int,
) -> CollectiveTurn:
    """Play a collective among `holders`, with a slot of so many elements for each; an all-reduce,
    and the sum of a small tensor, with one slot."""
    recorder = TurnRecorder(transport)
    group = RecordedGroup(tuple(range(holders)), 0, purpose, recorder)
    dtype = DTYPES[item_bytes]
    slots = 1 if operation in ("all_reduce", "sum") else holders
    pending = Pending()
    # What a collective is given is there before it, and no part of its profile.
    with recorder:
        x = torch.empty((slots, elements), dtype=dtype, device=META)
    with recorder.recording():
        match operation:
            case "all_gather":
                out = torch.empty_like(x)
                pending = group.all_gather(out, x.new_empty(elements))
            case "reduce_scatter":
                out = x.new_empty(elements)
                pending = group.reduce_scatter(out, x)
            case "all_reduce":
                out = x.view(-1)
                pending = group.start_all_reduce(out)
            case "sum":
                out = group.all_reduce(x)
    out_bytes = 0 if slots == 1 else out.untyped_storage().nbytes()
    begin = recorder.profile_result(out_bytes)
    with recorder.recording():
        pending.wait()
    return CollectiveTurn(begin, recorder.profile())


def gradient_bytes(module: nn.Module) -> int:
    """Bytes of the gradients on a module's weights."""
    return sum(_bytes(p.grad) for p in module.parameters())


def _bytes(x: Tensor | None) -> int:
    return 0 if x is None else x.untyped_storage().nbytes()
