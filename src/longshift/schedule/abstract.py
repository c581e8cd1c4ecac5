"""Tensors without numbers: shapes, bytes and an autograd that holds and releases memory as torch's does.

A storage counts into its `Memory` from when it is made until Python drops it, so that code written like torch's, with the same variables,
has the same peak. Autograd: a node holds what it saved until it has run; nodes run by descending number, leaves first; the gradients that a
node was given are gone before those that it returns are added up; where two gradients meet a third is made (torch adds in place where it
can, but not under the mode that counts its bytes); a leaf takes its first gradient itself where nothing else refers to it, else a copy.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

Shape = tuple[int, ...]


class Memory:
    """Bytes of storages that are alive, `now` and at the `most`; whether operations record what their backward needs. Mutable."""

    def __init__(self, recording: bool = False) -> None:
        self.now = self.most = self.nodes = 0
        self.recording = recording

    def tensor(self, shape: Shape, itemsize: int) -> "Tensor":
        return Tensor(Storage(self, math.prod(shape) * itemsize), shape, itemsize)


class Storage:
    """So many bytes of a memory, until it is dropped."""

    __slots__ = ("memory", "size")

    def __init__(self, memory: Memory, size: int):
        self.memory, self.size = memory, size
        memory.now += size
        memory.most = max(memory.most, memory.now)

    def __del__(self) -> None:
        self.memory.now -= self.size


class Tensor:
    """A shape over a storage. `needs` a gradient where it is a leaf; else `node` made it, as its output number `place`."""

    __slots__ = ("grad", "itemsize", "needs", "node", "place", "shape", "storage", "whole")

    def __init__(self, storage: Storage, shape: Shape, itemsize: int, whole: bool = True):
        self.storage, self.shape, self.itemsize, self.whole = storage, shape, itemsize, whole  # whole: contiguous
        self.needs, self.place = False, 0
        self.node: Node | None = None
        self.grad: Tensor | None = None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def memory(self) -> Memory:
        return self.storage.memory

    def detach(self) -> "Tensor":
        return Tensor(self.storage, self.shape, self.itemsize, self.whole)

    def leaf(self) -> "Tensor":
        """The same storage as the beginning of a graph."""
        found = self.detach()
        found.needs = True
        return found

    def new(self, shape: Shape | None = None, itemsize: int | None = None) -> "Tensor":
        return self.memory.tensor(self.shape if shape is None else shape, itemsize or self.itemsize)

    def shaped(self, *shape: int) -> "Tensor":
        """torch's reshape, outside of graphs: a view, or a copy where it is not contiguous."""
        return Tensor(self.storage, shape, self.itemsize) if self.whole else self.new(shape)

    def parts(self, sizes: Sequence[int], dim: int) -> "list[Tensor]":
        """Views that lie side by side along a dim, outside of graphs."""
        dim %= len(self.shape)
        whole = self.whole and math.prod(self.shape[:dim]) == 1
        return [Tensor(self.storage, (*self.shape[:dim], n, *self.shape[dim + 1 :]), self.itemsize, whole) for n in sizes]

    # Operations in graphs

    def __add__(self, other: "Tensor") -> "Tensor":
        """Of equal shapes, or of a vector to every row."""
        shape, wanted = other.shape, other.needs or other.node is not None

        def back(grad: Tensor) -> list[Tensor | None]:
            return [grad, None if not wanted else grad if grad.shape == shape else grad.new(shape)]

        return recorded(self.new(), (self, other), back)

    def __mul__(self, scale: float) -> "Tensor":
        return recorded(self.new(), (self,), lambda grad: [grad.new()])

    def unflatten(self, dim: int, sizes: Shape) -> "Tensor":
        last = self.shape[-1]
        view = Tensor(self.storage, (*self.shape[:-1], last // sizes[-1], sizes[-1]), self.itemsize, self.whole)
        return recorded(view, (self,), lambda grad: [grad.shaped(*grad.shape[:-2], last)])

    def flatten(self, first: int) -> "Tensor":
        shape = self.shape
        return recorded(self.shaped(*shape[:first], math.prod(shape[first:])), (self,), lambda grad: [grad.shaped(*shape)])

    def split(self, sizes: Sequence[int], dim: int) -> "list[Tensor]":
        shape, views = self.shape, self.parts(sizes, dim)
        return recorded_all(views, (self,), lambda *grads: [grads[0].new(shape)])


class Node:
    """An operation of a graph: what it saved, and where the gradients that its `back` returns go, by input. Mutable."""

    __slots__ = ("back", "number", "saved", "to")

    def __init__(self, number: int, back: Callable[..., Sequence[Tensor | None]], saved: Sequence[Tensor], to: "list[Edge | None]"):
        self.number, self.back, self.saved, self.to = number, back, tuple(x.detach() for x in saved), to


Target = Node | Tensor  # a node, or a leaf
Edge = tuple[Target, int]  # and which of its outputs


def recorded_all(outputs: list[Tensor], inputs: Sequence[Tensor], back: Callable[..., Any], saved: Sequence[Tensor] = ()) -> list[Tensor]:
    """The outputs, as made from the inputs. back(*grads of outputs, *saved) -> grads of the inputs; it must hold no tensor itself."""
    memory = outputs[0].memory
    if memory.recording and any(x.needs or x.node for x in inputs):
        memory.nodes += 1
        node = Node(memory.nodes, back, saved, [(x.node, x.place) if x.node else (x, 0) if x.needs else None for x in inputs])
        for place, output in enumerate(outputs):
            output.node, output.place = node, place
    return outputs


def recorded(output: Tensor, inputs: Sequence[Tensor], back: Callable[..., Any], saved: Sequence[Tensor] = ()) -> Tensor:
    return recorded_all([output], inputs, back, saved)[0]


def backward(outputs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """From gradients of the outputs, `given`, to those of the leaves, on them."""
    memory = outputs[0].memory
    recording, memory.recording = memory.recording, False
    awaited = _awaited({output.node for output in outputs if output.node})
    grads: dict[Target, dict[int, Tensor]] = {}
    for output, grad in zip(outputs, given):
        assert output.node
        _meet(grads, (output.node, output.place), grad)
    ready = [_turn(target) for target in grads if not awaited[target]]
    heapq.heapify(ready)
    while ready:
        target = heapq.heappop(ready)[2]
        if isinstance(target, Tensor):
            _to_leaf(target, grads.pop(target)[0], [x for held in grads.values() for x in held.values()] + list(given))
            continue
        found = _run(target, grads.pop(target))
        for number, edge in enumerate(target.to):
            if edge:
                grad, found[number] = found[number], None
                assert grad
                _meet(grads, edge, grad)
                del grad
                awaited[edge[0]] -= 1
                if not awaited[edge[0]]:
                    heapq.heappush(ready, _turn(edge[0]))
    memory.recording = recording


def _meet(grads: dict[Target, dict[int, Tensor]], edge: Edge, grad: Tensor) -> None:
    held = grads.setdefault(edge[0], {})
    held[edge[1]] = grad.new() if edge[1] in held else grad


def _turn(target: Target) -> tuple[int, int, Target]:
    """Sorts leaves before nodes, these from the last to the first."""
    return (1, -target.number, target) if isinstance(target, Node) else (0, id(target), target)


def _run(node: Node, grads: dict[int, Tensor]) -> list[Tensor | None]:
    """The gradients of its inputs; what it saved is gone."""
    found = list(node.back(*(grads[place] for place in sorted(grads)), *node.saved))
    node.saved = ()
    return found


def _to_leaf(leaf: Tensor, grad: Tensor, others: Sequence[Tensor]) -> None:
    if leaf.grad is None:
        leaf.grad = grad.new() if any(grad is other for other in others) else grad.detach()


def _awaited(roots: set[Node]) -> Counter[Target]:
    """How many gradients each node and leaf of a graph waits for."""
    found: Counter[Target] = Counter()
    seen, stack = set(roots), list(roots)
    while stack:
        for edge in stack.pop().to:
            if edge:
                found[edge[0]] += 1
                if isinstance(edge[0], Node) and edge[0] not in seen:
                    seen.add(edge[0])
                    stack.append(edge[0])
    return found
