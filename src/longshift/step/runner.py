"""What the operations of a program do under one layout: whole packs here, packs in chunks in
`step.chunk_runner`.

A whole pack's residual stream x [T', D] goes from unit to unit. Every part of a block is an
autograd graph of its own, from a detached input to an output: a kept graph waits for its backward;
where only the input waits, here or in a tier, `again` makes the graph anew. Numbers are the same
bits (activation checkpointing: arXiv 1604.06174, 2205.05198).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from longshift.dist.world import World
from longshift.documents.batch import Document
from longshift.documents.micro import HostPack, host_pack, place_pack
from longshift.layout import axes
from longshift.layout.layout import Layout
from longshift.layout.loss_rows import loss_rows
from longshift.model.decoder import Head, MicroBatch, build_unit
from longshift.model.functions import Elementwise
from longshift.model.kernels import Kernel
from longshift.parallel.seams import LayoutOps
from longshift.program.operations import Op
from longshift.spec.model import ModelSpec
from longshift.state.copies import Copies
from longshift.state.precision import Precision
from longshift.step.compose import layout_ops
from longshift.stream.tiers import Tensors, Tier


class Runner(ABC):
    """A layout's units and micro-batches on this rank. Mutable. `loaded`: the tensors of each
    micro-batch; `loss`: this rank's part of the loss sum, float64, zero where a tensor-parallel
    peer counts it; `seed`: what losses are multiplied with before gradients are formed; `learns`:
    whether a backward follows; `crossing`: boundary activations that have arrived or are to be
    sent."""

    loaded: dict[int, Any]

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        world: World,
        copies: Copies,
        precision: Precision,
        kernel: Kernel,
        by: Elementwise,
    ):
        self.spec = spec
        self.layout = layout
        self.world = world
        self.copies = copies
        self.precision = precision
        self.at = layout.coord(world.rank)
        self.ops = layout_ops(spec, layout, world, kernel)
        self.modules = {}
        for chunk in layout.units_of(spec.layers, self.at.pp):
            for unit in chunk:
                self.modules[unit] = build_unit(spec, unit, by, precision.float8)
                copies.fill(self.modules[unit])
        self.tier: Tier | None = None
        self.loss = torch.zeros((), dtype=torch.float64, device=world.device)
        self.seed = 0.0
        self.learns = True

    def counts(self, loss: Tensor) -> None:
        """Add to the loss sum what ranks with other cuts of the weights know too."""
        if self.layout.place(self.at, axes.weight_axes()) == 0:
            self.loss += loss

    def on_host(self, documents: Sequence[Document]) -> HostPack:
        """This rank's tokens of a pack, as `load` takes them. Any thread may ask, at any time."""
        return host_pack(documents, self.layout, self.world.rank, self.world.device)

    @abstractmethod
    def load(self, micro: int, pack: HostPack) -> None:
        """Make the tensors of a micro-batch."""

    def unload(self, micro: int) -> None:
        """Drop the tensors of a micro-batch."""
        del self.loaded[micro]

    def boundary(self, micro: int) -> Tensor:
        """Empty memory for what another stage sends: x, or its gradient, [T', D]."""
        shape = self.loaded[micro].tokens_here, self.spec.width
        return torch.empty(shape, dtype=self.precision.compute, device=self.world.device)

    @abstractmethod
    def received(self, op: Op, x: Tensor) -> None:
        """Take the boundary activation, or its gradient, that another stage computed."""

    @abstractmethod
    def to_send(self, op: Op) -> Tensor:
        """The boundary activation, or its gradient, that another stage needs."""

    @abstractmethod
    def compute(self, op: Op) -> None:
        """Compute one turn of a unit."""

    def arrive(self, op: Op) -> None:
        """Cut what another stage computed into chunks. Raises NotImplementedError where a layout
        has no such operation."""
        raise NotImplementedError(op)

    depart = put = fetch = await_fetch = drop = arrive


class WholePacks(Runner):
    """A layout that computes packs whole. Mutable. By (micro-batch, unit, part): `graphs` kept for
    a backward (input, where the output was), `inputs` kept for another forward, with attention's
    output and log-sum-exp; by micro-batch: the residual
    stream `x` and its gradient `g` where the pack has come to."""

    def __init__(self, *arguments: Any, tier: Tier | None):
        super().__init__(*arguments)
        self.tier = tier
        self.loaded: dict[int, MicroBatch] = {}
        self.x: dict[int, Tensor] = {}
        self.g: dict[int, Tensor] = {}
        self.graphs: dict[tuple, tuple[Tensor | None, GradientEdge | None]] = {}
        self.inputs: dict[tuple, Tensors] = {}
        self.coming: dict[tuple, Callable[[], Tensors]] = {}
        self.fetched: dict[tuple, Tensors] = {}
        self.turns = {
            "pass": self._pass,
            "forward": self._forward,
            "again": self._again,
            "backward": self._backward,
            "loss": self._loss,
            "pass on": self._pass_on,
            "score": self._score,
        }

    def load(self, micro: int, pack: HostPack) -> None:
        (share,) = pack.shares
        self.loaded[micro] = place_pack(
            self.spec,
            share,
            self.layout,
            self.world.rank,
            self.precision.compute,
            self.world.device,
        )

    def unload(self, micro: int) -> None:
        super().unload(micro)
        self.x.pop(micro, None)
        self.g.pop(micro, None)

    def received(self, op: Op, x: Tensor) -> None:
        self._stream(op)[op.micro] = x

    def to_send(self, op: Op) -> Tensor:
        return self._stream(op).pop(op.micro)

    def _stream(self, op: Op) -> dict[int, Tensor]:
        """What a message between stages carries: the residual stream, or its gradient."""
        return self.x if op.turn == "forward" else self.g

    def compute(self, op: Op) -> None:
        self.turns[op.turn](op)

    def put(self, op: Op) -> None:
        assert self.tier is not None
        key = self._key(op)
        self.tier.put(key, *self.inputs.pop(key))

    def fetch(self, op: Op) -> None:
        assert self.tier is not None
        key = self._key(op)
        self.coming[key] = self.tier.fetch(key)

    def await_fetch(self, op: Op) -> None:
        key = self._key(op)
        self.inputs[key] = self.fetched[key] = self.coming.pop(key)()

    def drop(self, op: Op) -> None:
        assert self.tier is not None
        key = self._key(op)
        self.tier.recycle(self.fetched.pop(key))
        self.tier.drop(key)

    @staticmethod
    def _key(op: Op) -> tuple[int, int, str]:
        return op.micro, op.unit, op.part

    def _pass(self, op: Op) -> None:
        """Compute a part without a graph. Its input waits for the backward, with attention's output
        and log-sum-exp."""
        x = self.x[op.micro]
        # Attention fills the list, so that `again` need not compute it.
        attention_results: list[Tensor] = []
        ops = self.ops.keeping(attention_results)
        with torch.no_grad():
            self.x[op.micro] = self.modules[op.unit](x, self.loaded[op.micro], ops)
        self.inputs[self._key(op)] = x, *attention_results

    def _pass_on(self, op: Op) -> None:
        """Compute a part of which nothing is kept."""
        with torch.no_grad():
            self.x[op.micro] = self.modules[op.unit](
                self.x.pop(op.micro, None), self.loaded[op.micro], self.ops
            )

    def _score(self, op: Op) -> None:
        """Compute the loss of a block of rows alone."""
        head = self.modules[op.unit]
        assert isinstance(head, Head)
        x = self.x[op.micro]
        self.counts(score_of_rows(head, x, self.loaded[op.micro], self.ops, op.number))

    def _forward(self, op: Op) -> None:
        """Compute a part that keeps its graph. What goes on is the output without it."""
        self.x[op.micro] = self._graph(op, self.x.pop(op.micro, None), self.ops)

    def _again(self, op: Op) -> None:
        """Compute a part again, with its graph."""
        x, *attention_results = self.inputs.pop(self._key(op))
        self._graph(op, x, self.ops.keeping(attention_results))

    def _graph(self, op: Op, x: Tensor | None, ops: LayoutOps) -> Tensor:
        """The output; what is kept for the backward is the graph and its input."""
        x = None if x is None else x.detach().requires_grad_()
        y = self.modules[op.unit](x, self.loaded[op.micro], ops)
        # An embedding that is not trained has none.
        edge = get_gradient_edge(y) if y.requires_grad else None
        self.graphs[self._key(op)] = x, edge
        return y.detach()

    def _backward(self, op: Op) -> None:
        """Use up a kept graph, which leaves the gradients of weights on them."""
        self.copies.expect(op.unit)
        x, edge = self.graphs.pop(self._key(op))
        # A list, because a name would keep the gradient while the backward runs.
        grads = [self.g.pop(op.micro)]
        if edge is not None:
            torch.autograd.backward((edge,), (grads.pop(),))

        # The embedding has no input that could have a gradient.
        if x is not None:
            assert x.grad is not None
            self.g[op.micro] = x.grad

    def _loss(self, op: Op) -> None:
        """Compute loss and gradient of one block of rows together, so that no tensor holds all
        logits (as Liger Kernel does, arXiv 2410.10989)."""
        x = self.x[op.micro]
        head = self.modules[op.unit]
        assert isinstance(head, Head)
        self.copies.expect(op.unit)
        if op.number == 0:
            self.g[op.micro] = torch.empty_like(x)
        micro = self.loaded[op.micro]
        loss = loss_of_rows(head, x, self.g[op.micro], micro, self.ops, op.number, self.seed)
        self.counts(loss)
        is_last = (op.number + 1) * loss_rows(self.spec, len(x)) >= len(x)
        if is_last:
            del self.x[op.micro]


def loss_of_rows(
    head: Head,
    x_TD: Tensor,
    dx_TD: Tensor,
    micro: MicroBatch,
    ops: LayoutOps,
    number: int,
    seed: float,
) -> Tensor:
    """Loss sum of the `number`-th block of rows of x; writes the rows' gradients, times `seed`,
    into dx, and leaves the weights' on them."""
    rows, labels = _rows(head, x_TD, micro, number)
    # Events of a chunked pack are played without gradients.
    with torch.enable_grad():
        x = x_TD[rows].detach().requires_grad_()
        loss = head.loss(x, labels, ops)
        torch.autograd.backward(loss, torch.full_like(loss, seed))
    assert x.grad is not None
    dx_TD[rows] = x.grad
    return loss.detach()


def score_of_rows(
    head: Head, x_TD: Tensor, micro: MicroBatch, ops: LayoutOps, number: int
) -> Tensor:
    """Loss sum of the `number`-th block of rows of x, without gradients."""
    rows, labels = _rows(head, x_TD, micro, number)
    with torch.no_grad():
        return head.loss(x_TD[rows], labels, ops)


def _rows(head: Head, x_TD: Tensor, micro: MicroBatch, number: int) -> tuple[slice, Tensor]:
    """Where the `number`-th block of rows is, and its labels: those of every tensor-parallel rank's
    share of the tokens."""
    height = loss_rows(head.spec, len(x_TD))
    rows = slice(number * height, (number + 1) * height)
    return rows, micro.labels_T.view(-1, len(x_TD))[:, rows].reshape(-1)
