"""Plays torch code on tensors of the `meta` device, which have shapes and no storage, and writes
down what it does.

A storage counts from the operation that made it until Python drops it, as it does on a real
device, so that the code under the recorder has the peak that it has in a run. Under the mode
autograd adds two gradients that meet into a new tensor, where without it may add in place: what
is counted is never less than what is. Of what a kernel needs inside itself only the workspace of
FlashAttention's backward on a GPU is counted.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longshift.cluster.cluster import Heads, Operation
from longshift.dist.collectives import Group, Pending
from longshift.dist.live_bytes import flash_backward_bytes
from longshift.model.functions import Elementwise
from longshift.model.kernels import Kernel
from longshift.spec.model import attended
from longshift.weigh.meta_kernels import call_meta_kernel

FORWARD, BACKWARD = 4, 10  # FLOPs of attention, a pair of tokens and channel of a query head
Transport = Literal["gloo", "nccl"]

MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # which argument is the left factor
# Operations whose result has the storage of an argument, or gives it another.
CHANGE_STORAGE = {"_unsafe_view", "resize_", "set_"}
# Operations that touch no element, and those that write one tensor which they do not read.
NO_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *CHANGE_STORAGE,
}
ONLY_WRITE = {"copy_", "fill_", "zero_"}
# Operations that read, or write, some elements of a tensor: as many as the result, or the values,
# have.
GATHERS = {"embedding", "gather", "index", "index_select"}
SCATTERS = {"scatter_", "scatter_add_", "index_put_", "index_add_"}
aten = torch.ops.aten


def transport_on(is_gpu: bool) -> Transport:
    """How collectives move between devices of a kind."""
    return "nccl" if is_gpu else "gloo"


class Matmul(NamedTuple):
    """[rows, inner] @ [inner, columns], `batch` times in one kernel. `sums_tokens`: a gradient of
    weights."""

    batch: int
    rows: int
    inner: int
    columns: int
    sums_tokens: bool

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.rows * self.inner * self.columns


class MemoryPass(NamedTuple):
    """A kernel that reads and writes memory: elementwise operations, sums, copies. `sizes`: bytes
    of each tensor that it touches."""

    sizes: tuple[int, ...]


class AttentionCall(NamedTuple):
    """Attention of `rows` queries to `keys` in each query head. `pairs`: of a query and a key that
    it sees; causal ones n^2 / 2."""

    backward: bool
    rows: int
    keys: int
    pairs: float
    heads: Heads

    @property
    def flops(self) -> int:
        """Causal scores are counted once."""
        factor = BACKWARD if self.backward else FORWARD
        return int(factor * self.pairs * self.heads.query * self.heads.width)


class Collective(NamedTuple):
    """A collective of the ranks along an axis. `size_bytes`: of the whole tensor that is gathered
    or reduced, of what a rank has for all ranks of an all-to-all, or of a message."""

    axis: str
    operation: Operation
    size_bytes: float


DeviceCall = Matmul | MemoryPass | AttentionCall | Collective


@dataclass(frozen=True)
class TurnProfile:
    """What one turn does on one rank.

    `peak`: most bytes above those alive when the turn began, its results included. `output`: bytes
    of the tensors that it returns. `graph`: bytes that a forward keeps for its backward, or a pass
    for another forward, besides input and output. `grads`: bytes of the weights' gradients that it
    leaves. `sent`: bytes out of this rank to others, by axis. `buffers`: bytes by buffer, of an
    event of a chunk (`weigh.chunk_profile`). `calls`: kernels and collectives, in order."""

    peak: int
    output: int = 0
    graph: int = 0
    grads: int = 0
    sent: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    calls: tuple[DeviceCall, ...] = field(default=(), repr=False)

    @cached_property
    def flops(self) -> int:
        """Of matmuls and of attention."""
        return sum(call.flops for call in self.calls if isinstance(call, Matmul | AttentionCall))


class TurnRecorder(TorchDispatchMode):
    """Counts bytes, kernels and messages of meta tensors. Mutable. `transport`: NCCL stands for
    GPUs, gloo for CPUs."""

    def __init__(self, transport: Transport):
        super().__init__()
        self.transport: Transport = transport
        self.now = 0
        self.begin_bytes = 0  # of the turn
        self.peak = 0
        self.sizes: dict[int, int] = {}  # of storages that are alive, by address
        self.sent: Counter[str] = Counter()
        self.calls: list[DeviceCall] = []
        # Whether what is played is one kernel on a device, which is counted as a whole.
        self.in_kernel = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to skip the compiler would import it, which takes a
        second."""
        return False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record one turn, which `profile` tells when it has ended."""
        self.begin_bytes = self.now
        self.peak = self.now
        self.sent = Counter()
        self.calls = []
        with self, torch.enable_grad():
            yield

    @property
    def left_bytes(self) -> int:
        """Bytes now above those alive when the turn began."""
        return self.now - self.begin_bytes

    def profile_result(self, size: int) -> TurnProfile:
        """What the turn did, of whose bytes so many are its result, and the others are kept."""
        return self.profile(output=size, graph=self.left_bytes - size)

    def profile(self, **sizes: Any) -> TurnProfile:
        """What the turn did up to now; `sizes`: fields that only the caller knows."""
        sent = {axis: size for axis, size in self.sent.items() if size}
        peak = self.peak - self.begin_bytes
        return TurnProfile(peak=peak, sent=sent, calls=tuple(self.calls), **sizes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = self._call(func, args, kwargs)
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self._see(x)
        if not func.is_view:
            self._count(func, args, kwargs, out)
        return out

    def _call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        # 1. What an operation writes in place, or is given as `out`, is its result.
        target = _target(func)
        if target == "self":
            return args[0]
        if target and kwargs[target].numel():
            return kwargs[target]

        # 2. Other results.
        if func.is_view or func._opname in CHANGE_STORAGE or target:
            return func(*args, **kwargs)
        out = call_meta_kernel(func, args, kwargs)
        if func is aten.native_layer_norm.default and self.transport == "gloo":
            y, *statistics = out
            return y, *(x.to(y.dtype) for x in statistics)  # a CPU keeps them in y's format
        return out

    def _see(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        address = storage._cdata
        # Views share a storage, which is counted once.
        if address not in self.sizes:
            self.sizes[address] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, address)

    def _drop(self, address: int) -> None:
        self.now -= self.sizes.pop(address)

    def _count(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        name = func._opname
        if "flash_attention_backward" in name and self.transport == "nccl":
            workspace = flash_backward_bytes(args[1], args[2])
            self.peak = max(self.peak, self.now + workspace)
        if self.in_kernel or name in NO_KERNEL:
            return
        if name.rstrip("_") in MATMULS:
            left = args[MATMULS[name.rstrip("_")]]
            rows, inner = left.shape[-2:]
            columns = out.shape[-1]
            batch = out.numel() // max(1, rows * columns)
            # Only the gradient of a weight has a transposed left factor.
            self.calls.append(Matmul(batch, rows, inner, columns, left.stride(-1) != 1))
            return
        if name in GATHERS:
            sizes = 2 * _sizes([out]) + _sizes(args[1:])
        elif name in SCATTERS:
            sizes = 3 * _sizes(args[1:])
        else:
            inputs = [x for key, x in kwargs.items() if key != _target(func)]
            sizes = _sizes(args[name in ONLY_WRITE :]) + _sizes(inputs) + _sizes([out])
        if any(sizes):
            self.calls.append(MemoryPass(sizes))

    # Kernels: pairs of tokens that see each other in attention, which shapes alone do not tell

    def count_calls(self, kernel: Kernel) -> Kernel:
        """The kernel, whose calls are counted."""
        count = self._one_kernel
        packed = kernel.packed
        if packed:
            packed = replace(
                packed,
                forward=count(
                    packed.forward,
                    lambda y, q, k, v, ends, lengths, window, scale: _documents(
                        q, k, lengths, window
                    ),
                ),
                backward=count(
                    packed.backward,
                    lambda y, grad, q, k, v, out, lse, ends, lengths, window, scale: _documents(
                        q, k, lengths, window, backward=True
                    ),
                ),
            )
        return replace(
            kernel,
            forward=count(kernel.forward, lambda y, q, k, v, causal, scale: _piece(q, k, causal)),
            backward=count(
                kernel.backward,
                lambda y, grad, q, k, v, out, lse, causal, scale: _piece(
                    q, k, causal, backward=True
                ),
            ),
            fold=count(
                kernel.fold, lambda y, out, lse, q, k, v, causal, scale, first: _piece(q, k, causal)
            ),
            add=count(
                kernel.add,
                lambda y, dq, dk, dv, grad, q, k, v, out, lse, causal, scale: _piece(
                    q, k, causal, backward=True
                ),
            ),
            rest=kernel.rest and self.count_calls(kernel.rest),
            packed=packed,
        )

    def fuse(self, functions: Elementwise) -> Elementwise:
        """The functions as a compiler makes them: each is one kernel that reads its arguments once
        and writes its results."""
        kernels = {}
        for part in fields(functions):
            kernels[part.name] = self._one_kernel(
                getattr(functions, part.name), lambda out, *args: MemoryPass(_sizes([*args, out]))
            )
        return Elementwise(**kernels)

    def _one_kernel(self, function: Any, describe: Callable[..., DeviceCall]) -> Any:
        """The function, which is one kernel on a device; None where a kernel has no such function.
        `describe`: says which, of its result and its arguments."""
        if function is None:
            return None

        def play(*args: Any) -> Any:
            # What a kernel calls is a part of it, also where that is a kernel elsewhere.
            was_in_kernel = self.in_kernel
            self.in_kernel = True
            out = function(*args)
            self.in_kernel = was_in_kernel
            self.calls.append(describe(out, *args))
            return out

        return play


@cache
def _target(func: Any) -> str | None:
    """Where an operation writes its one result: "self", or the name of the argument; None where it
    makes a tensor."""
    names = [argument.name for argument in func._schema.arguments if argument.is_write]
    if len(names) != 1 or func.is_view or func._opname in CHANGE_STORAGE:
        return None
    return "self" if func._schema.arguments[0].name == names[0] else names[0]


def _sizes(values: Sequence[Any]) -> tuple[int, ...]:
    """Bytes of each tensor among these; of a tensor that is broadcast, those that it has."""
    sizes: tuple[int, ...] = ()
    for x in values:
        if isinstance(x, Tensor):
            shape_bytes = x.numel() * x.itemsize
            sizes += (min(shape_bytes, x.untyped_storage().nbytes()),)
        elif isinstance(x, tuple | list):
            sizes += _sizes(x)
    return sizes


def _piece(q: Tensor, k: Tensor, causal: bool, backward: bool = False) -> AttentionCall:
    """Attention of q [T, N, H] to k [S, K, H]."""
    pairs = len(q) * len(k) / (2 if causal else 1)
    return AttentionCall(backward, len(q), len(k), pairs, _heads(q, k))


def _documents(
    q: Tensor, k: Tensor, lengths: Sequence[int], window: int | None, backward: bool = False
) -> AttentionCall:
    """Attention of whole documents, each to itself, to the last `window` tokens where there is
    one."""
    pairs = sum(float(attended(length, window)) for length in lengths)
    return AttentionCall(backward, len(q), len(k), pairs, _heads(q, k))


def _heads(q: Tensor, k: Tensor) -> Heads:
    return Heads(q.shape[1], k.shape[1], q.shape[2])


class RecordedGroup(Group):
    """A group of ranks of which only this one is played: bytes that leave it are counted, nothing
    arrives."""

    def __init__(self, ranks: tuple[int, ...], rank: int, axis: str, recorder: TurnRecorder):
        self.ranks = ranks
        self.axis = axis
        self.recorder = recorder
        self.size = len(ranks)
        self.index = ranks.index(rank)
        self.handle: Any = recorder if self.size > 1 else None
        self.is_inside = False  # a collective
        self.direct = self.size > 1 and recorder.transport == "gloo"
        self.swaps = self.direct and self.size == 2

    def _send(self, elements: int, x: Tensor) -> None:
        self.recorder.sent[self.axis] += elements * x.itemsize

    @contextmanager
    def _collective(self, operation: Operation, x: Tensor, share: float = 1.0) -> Iterator[None]:
        """Record a collective, and not what it is made of. Its size is `share` times the
        tensor's."""
        # One collective may be made of another, as an all-reduce of gloo's is of an all-gather.
        is_outermost = not self.is_inside
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = not is_outermost
        if is_outermost and self.size > 1:
            size_bytes = share * x.numel() * x.itemsize
            self.recorder.calls.append(Collective(self.axis, operation, size_bytes))

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        with self._collective("all_gather", out):
            return super().all_gather(out, x)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        with self._collective("reduce_scatter", x):
            return super().reduce_scatter(out, x)

    def all_to_all(self, out: Tensor, x: Tensor) -> Pending:
        with self._collective("all_to_all", x):
            return super().all_to_all(out, x)

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        with self._collective("all_reduce", x):
            return super().all_reduce(x, op)

    def trade(self, out: Tensor, x: Tensor, out_sizes: list[int], in_sizes: list[int]) -> Pending:
        # The ring sends a message. An all-to-all sends to all others what they need of x.
        if self.axis == "ring":
            collective = self._collective("send", x)
        else:
            collective = self._collective("all_to_all", x, self.size / max(1, self.size - 1))
        with collective:
            return super().trade(out, x, out_sizes, in_sizes)

    def _native_all_to_all(self, out: Tensor, x: Tensor, *sizes: list[int]) -> None:
        # Sizes by rank leave out what a rank keeps; else that is an equal share of x.
        elements = sum(sizes[1]) if sizes else x.numel() * (self.size - 1) // self.size
        self._send(elements, x)

    def _native_all_gather(self, out: Tensor, x: Tensor) -> None:
        self._send(x.numel() * (self.size - 1), x)

    def _native_reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        self._send(x.numel() * (self.size - 1) // self.size, x)

    def _native_all_reduce(
        self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, later: bool = False
    ) -> None:
        # Rounded once, as a whole: elements need not divide evenly.
        self.recorder.sent[self.axis] += 2 * x.nbytes * (self.size - 1) // self.size
