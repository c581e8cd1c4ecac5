"""Plays torch code on tensors of the `meta` device, which have shapes and no storage, and writes down what it does.

A storage counts from the operation that made it until Python drops it, as it does on a real
device, so that the code under the recorder has the peak that it has in a run. Under the mode
autograd adds two gradients that meet into a new tensor, where without it may add in place: what
is counted is never less than what is. Of what a kernel needs inside itself only the workspace of
FlashAttention's backward on a GPU is counted.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from longshift.dist.held import flash_backward_bytes
from longshift.model.attention import Attention
from longshift.model.functions import Elementwise
from longshift.model.kernels import Kernel
from longshift.spec.model import attended

Transport = Literal["gloo", "nccl"]

META = torch.device("meta")
FORWARD, BACKWARD = 4, 10  # FLOPs of attention, a pair of tokens and channel of a query head
MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # which argument is the left factor
# Elementwise operations whose results are true or false.
OF_TRUTHS = {"eq", "ne", "lt", "le", "gt", "ge", "isinf", "isnan", "isfinite", "isposinf", "isneginf", "signbit"}
OF_INTEGERS = {"add", "sub", "mul", "where", "neg", "bitwise_and", "bitwise_or", "bitwise_not"}  # and of integers, if their arguments are
SCALARS = {"alpha", "approximate"}  # keyword arguments that change no shape or format
# Operations that touch no element, and those that write one tensor which they do not read.
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "_unsafe_view"}
ONLY_WRITE = {"copy_", "fill_", "zero_"}
# Operations that read, or write, some elements of a tensor: as many as the result, or the values, have.
GATHERS = {"embedding", "gather", "index", "index_select"}
SCATTERS = {"scatter_", "scatter_add_", "index_put_", "index_add_"}
aten = torch.ops.aten


class Matmul(NamedTuple):
    """[rows, inner] @ [inner, columns], `batch` times in one kernel. `sums_tokens`: a gradient of weights."""

    batch: int
    rows: int
    inner: int
    columns: int
    sums_tokens: bool

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.rows * self.inner * self.columns


class MemoryPass(NamedTuple):
    """A kernel that reads and writes memory: elementwise operations, sums, copies. `sizes`: bytes of each tensor that it touches."""

    sizes: tuple[int, ...]


class AttentionCall(NamedTuple):
    """Attention of `rows` queries to `keys` in each query head. `pairs`: of a query and a key that it sees; causal ones n^2 / 2."""

    backward: bool
    rows: int
    keys: int
    pairs: float
    heads: Heads

    @property
    def flops(self) -> int:
        """Causal scores are counted once."""
        return int((BACKWARD if self.backward else FORWARD) * self.pairs * self.heads.query * self.heads.width)


class Collective(NamedTuple):
    """A collective of the ranks along an axis. `size_bytes`: of the whole tensor that is gathered or reduced, of what a rank has for
    all ranks of an all-to-all, or of a message."""

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
    """Counts bytes, FLOPs and messages of meta tensors. Mutable. `transport`: NCCL stands for GPUs, gloo for CPUs."""

    def __init__(self, transport: Transport):
        super().__init__()
        self.transport: Transport = transport
        self.now = self.peak = 0
        self.sizes: dict[int, int] = {}  # of storages that are alive, by address
        self.sent: Counter[str] = Counter()
        self.calls: list[DeviceCall] = []
        self.in_kernel = False  # whether what is played is one kernel on a device, which is counted as a whole
        self.pieces: dict[tuple, tuple[int, list[DeviceCall]]] = {}  # of attention, played before: peak, calls

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to skip the compiler would import it, which takes a second."""
        return False

    @contextmanager
    def recording(self) -> Iterator["TurnRecording"]:
        """Record one turn: yields what is known when it has ended."""
        turn = TurnRecording(self, self.now)
        self.peak, self.sent, self.calls = self.now, Counter(), []
        with self, torch.enable_grad():
            yield turn

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = self._call(func, args, kwargs)
        if isinstance(out, Tensor):
            self._see(out)
        elif isinstance(out, tuple | list):
            for x in out:
                if isinstance(x, Tensor):
                    self._see(x)
        if not func.is_view:
            self._count(func, args, kwargs, out)
        return out

    def _call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        written = _written(func)
        if written == "self":
            return args[0]
        if written and kwargs[written].numel():
            return kwargs[written]
        if written is None and _is_elementwise(func) and kwargs.keys() <= SCALARS and (result := _broadcast(func, args)) is not None:
            return result
        if func in RESULTS:
            return RESULTS[func](*args, **kwargs)
        out = func(*args, **kwargs)
        if func is aten.native_layer_norm.default and self.transport == "gloo":  # a CPU keeps statistics in x's format
            return out[0], *(x.to(out[0].dtype) for x in out[1:])
        return out

    def _see(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        address = storage._cdata
        if address not in self.sizes:
            self.sizes[address] = size = storage.nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, address)

    def _drop(self, address: int) -> None:
        self.now -= self.sizes.pop(address)

    def _count(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        name = func._opname
        if "flash_attention_backward" in name and self.transport == "nccl":
            self.peak = max(self.peak, self.now + flash_backward_bytes(*args[1:3]))
        if self.in_kernel or name in NO_KERNEL:
            return
        left = MATMULS.get(name.rstrip("_"))
        if left is not None:
            rows, inner, columns = *args[left].shape[-2:], out.shape[-1]
            batch = out.numel() // max(1, rows * columns)
            self.calls.append(Matmul(batch, rows, inner, columns, args[left].stride(-1) != 1))
            return
        if name in GATHERS:
            sizes = 2 * _sizes([out]) + _sizes(args[1:])
        elif name in SCATTERS:
            sizes = 3 * _sizes(args[1:])
        else:
            read = [*args[name in ONLY_WRITE :], *(x for key, x in kwargs.items() if key != _written(func))]
            sizes = _sizes(read) + _sizes([out])
        if any(sizes):
            self.calls.append(MemoryPass(sizes))

    # Attention: pairs of tokens that see each other, which shapes alone do not tell

    def attention(self, of: Attention) -> Attention:
        """The attention, whose calls are counted, and whose equal pieces are played once."""
        return RecordedAttention(self.counted(of.kernel), of.scale, of.again, of.kept, self)

    def play_piece(self, key: tuple, piece: Callable[[], None]) -> None:
        """Play a piece that leaves nothing behind, or count again what an equal one did."""
        if key not in self.pieces:
            peak, count, self.peak = self.peak, len(self.calls), self.now
            piece()
            self.pieces[key] = self.peak - self.now, self.calls[count:]
            self.peak = max(self.peak, peak)
            return
        peak, calls = self.pieces[key]
        self.peak = max(self.peak, self.now + peak)
        self.calls += calls

    def counted(self, kernel: Kernel) -> Kernel:
        """The kernel, whose calls are counted."""
        counted = replace(
            kernel,
            forward=self._counted(kernel.forward, lambda q, k, v, causal, scale: _piece(q, k, causal)),
            backward=self._counted(kernel.backward, lambda grad, q, k, v, out, lse, causal, scale: _piece(q, k, causal, True)),
        )
        if kernel.fold:
            fold = self._counted(kernel.fold, lambda out, lse, q, k, v, causal, scale, first: _piece(q, k, causal))
            counted = replace(counted, fold=fold)
        if kernel.add:
            add = self._counted(kernel.add, lambda dq, dk, dv, grad, q, k, v, out, lse, causal, scale: _piece(q, k, causal, True))
            counted = replace(counted, add=add)
        if kernel.rest:
            counted = replace(counted, rest=self.counted(kernel.rest))
        if packed := kernel.packed:
            forward = self._counted(packed.forward, lambda q, k, v, ends, lengths, window, scale: _documents(q, k, lengths, window))
            backward = self._counted(
                packed.backward, lambda grad, q, k, v, out, lse, ends, lengths, window, scale: _documents(q, k, lengths, window, True)
            )
            counted = replace(counted, packed=replace(packed, forward=forward, backward=backward))
        return counted

    def _counted(self, function: Callable[..., Any], call: Callable[..., AttentionCall]) -> Callable[..., Any]:
        def play(*args: Any) -> Any:
            self.calls.append(call(*args))
            with self.one_kernel():
                return function(*args)

        return play

    @contextmanager
    def one_kernel(self) -> Iterator[None]:
        """What is played meanwhile is one kernel on a device."""
        outer, self.in_kernel = self.in_kernel, True
        try:
            yield
        finally:
            self.in_kernel = outer

    def compiled(self, functions: Elementwise) -> Elementwise:
        """The functions as a compiler makes them: each is one kernel that reads its arguments once and writes its results."""
        return Elementwise(*(self._fused(getattr(functions, part.name)) for part in fields(functions)))

    def _fused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def play(*args: Any) -> Any:
            with self.one_kernel():
                out = function(*args)
            self.calls.append(MemoryPass(_sizes(args) + _sizes([out])))
            return out

        return play


# [Note: meta kernels] Torch's are Python for many operations, and take up to a millisecond where a dispatch takes ten
# microseconds. What the operation's schema tells is not computed: the tensor that is written in place or given as `out`,
# and the shape of an elementwise result.


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _concatenated(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(max(tensors, key=lambda x: x.ndim).shape)
    shape[dim] = sum(x.shape[dim] for x in tensors if x.ndim == len(shape))  # an empty tensor of one dim fits anywhere
    return _empty(shape, tensors[0].dtype)


def _reduced(x: Tensor, dims: Sequence[int] | None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    gone = {dim % x.ndim for dim in (dims or range(x.ndim))}
    shape = [1 if dim in gone else size for dim, size in enumerate(x.shape) if keepdim or dim not in gone]
    return _empty(shape, dtype or x.dtype)


def _like(x: Tensor, dtype: torch.dtype | None = None, **how: Any) -> Tensor:
    """A new tensor of this shape, whose dims lie in memory in the same order."""
    if x.is_contiguous():
        return _empty(x.shape, dtype or x.dtype)
    outermost_first = sorted(range(x.ndim), key=lambda dim: -x.stride(dim))
    inverse = [outermost_first.index(dim) for dim in range(x.ndim)]
    return _empty([x.shape[dim] for dim in outermost_first], dtype or x.dtype).permute(inverse)


def _sum(x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    return _reduced(x, dims, keepdim, dtype or (x.dtype if x.is_floating_point() else torch.int64))


def _stacked(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim % (len(shape) + 1), len(tensors))
    return _empty(shape, tensors[0].dtype)


# Tensors that operations make, where torch takes longest to say: shape and format, from their arguments.
RESULTS: Mapping[Any, Callable[..., Tensor]] = {
    aten.arange.start_step: lambda start, end, step=1, dtype=None, **how: _empty((-(-(end - start) // step),), dtype or torch.int64),
    aten.cat.default: _concatenated,
    aten.amax.default: lambda x, dims=None, keepdim=False: _reduced(x, dims, keepdim),
    aten.linalg_vector_norm.default: lambda x, order=2, dims=None, keepdim=False, dtype=None: _reduced(x, dims, keepdim, dtype),
    aten.mm.default: lambda left, right: _empty((left.shape[0], right.shape[1]), left.dtype),
    aten.mv.default: lambda left, right: _empty(left.shape[:1], left.dtype),
    aten.empty_like.default: _like,
    aten.zeros_like.default: _like,
    aten.stack.default: _stacked,
    aten.sum.default: lambda x, dtype=None: _sum(x, dtype=dtype),
    aten.sum.dim_IntList: _sum,
    aten.new_empty.default: lambda x, size, dtype=None, **how: _empty(size, dtype or x.dtype),
}


@cache
def _written(func: Any) -> str | None:
    """Where an operation writes its one result: "self", or the name of the argument; None where it makes a tensor."""
    names = [argument.name for argument in func._schema.arguments if argument.is_write]
    if len(names) != 1 or func.is_view or func._opname in ("resize_", "set_"):
        return None
    return "self" if func._schema.arguments[0].name == names[0] else names[0]


@cache
def _is_elementwise(func: Any) -> bool:
    """Whether the result has the common shape of the arguments."""
    return torch.Tag.pointwise in func.tags and len(func._schema.returns) == 1


def _broadcast(func: Any, args: tuple) -> Tensor | None:
    """The result of an elementwise operation; None where torch has to say of which format it is."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    first, values = tensors[0], tensors[1:] if func._opname == "where" else tensors
    dtype = functools.reduce(torch.promote_types, {x.dtype for x in values if x.ndim} or {x.dtype for x in values})
    if scalars := [x.dtype for x in values if not x.ndim and x.is_floating_point() and not dtype.is_floating_point]:
        dtype = scalars[0]
    if func._opname in OF_TRUTHS or func._opname.startswith("logical_"):
        dtype = torch.bool
    elif not (dtype.is_floating_point or _stays_integer(func._opname, dtype, args)):
        return None
    elif dtype == first.dtype and not first.is_contiguous() and all(x.shape == first.shape for x in tensors):
        return _like(first)
    shape = [1] * max(x.ndim for x in tensors)
    for x in tensors:
        for dim in range(1, x.ndim + 1):
            shape[-dim] = max(shape[-dim], x.shape[-dim]) if x.shape[-dim] else 0
    return _empty(shape, dtype)


def _stays_integer(name: str, dtype: torch.dtype, args: tuple) -> bool:
    is_bool, has_float = dtype == torch.bool, any(isinstance(x, float) for x in args)
    return name in OF_INTEGERS and not has_float and (not is_bool or name.startswith("bitwise_"))


def _sizes(values: Sequence[Any]) -> tuple[int, ...]:
    """Bytes of each tensor among these; of a tensor that is broadcast, those that it has."""
    found: tuple[int, ...] = ()
    for x in values:
        if isinstance(x, Tensor):
            found += (min(x.numel() * x.itemsize, x.untyped_storage().nbytes()),)
        elif isinstance(x, tuple | list):
            found += _sizes(x)
    return found


def _piece(q: Tensor, k: Tensor, causal: bool, backward: bool = False) -> AttentionCall:
    """Attention of q [T, N, H] to k [S, K, H]."""
    return AttentionCall(backward, len(q), len(k), len(q) * len(k) / (2 if causal else 1), _heads(q, k))


def _documents(q: Tensor, k: Tensor, lengths: Sequence[int], window: int | None, backward: bool = False) -> AttentionCall:
    """Attention of whole documents, each to itself, to the last `window` tokens where there is one."""
    pairs = sum(float(attended(length, window)) for length in lengths)
    return AttentionCall(backward, len(q), len(k), pairs, _heads(q, k))


def _heads(q: Tensor, k: Tensor) -> Heads:
    return Heads(q.shape[1], k.shape[1], q.shape[2])


class TurnRecording:
    """A turn that is recorded: the counts of the recorder since it began. Mutable."""

    def __init__(self, recorder: TurnRecorder, before: int):
        self.recorder, self.before = recorder, before

    @property
    def left(self) -> int:
        """Bytes now above those alive when it began."""
        return self.recorder.now - self.before

    def profile(self, **sizes: Any) -> TurnProfile:
        """What was recorded up to now; `sizes`: fields that only the caller knows."""
        recorder = self.recorder
        sent = {axis: size for axis, size in recorder.sent.items() if size}
        return TurnProfile(peak=recorder.peak - self.before, sent=sent, calls=tuple(recorder.calls), **sizes)


@dataclass(frozen=True)
class RecordedAttention(Attention):
    """Attention of which a ring, a window or a chunk adds many equal pieces to sums, in place."""

    recorder: TurnRecorder | None = None

    def fold(self, *given: Any, **how: Any) -> None:
        assert self.recorder
        self.recorder.play_piece(_likeness("fold", given, how), lambda: Attention.fold(self, *given, **how))

    def add(self, *given: Any, **how: Any) -> None:
        assert self.recorder
        self.recorder.play_piece(_likeness("add", given, how), lambda: Attention.add(self, *given, **how))


def _likeness(name: str, given: Sequence[Any], how: dict[str, Any]) -> tuple:
    """What equal pieces have in common: shapes and strides of tensors, and all other arguments."""
    flat = [x for group in given for x in (group if isinstance(group, tuple) else (group,))]
    tensors = [(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in flat]
    return name, *tensors, *sorted(how.items())


class RecordedGroup(Group):
    """A group of ranks of which only this one is played: bytes that leave it are counted, nothing arrives."""

    def __init__(self, ranks: tuple[int, ...], rank: int, axis: str, recorder: TurnRecorder):
        self.ranks, self.axis, self.recorder = ranks, axis, recorder
        self.size, self.index = len(ranks), ranks.index(rank)
        self.handle: Any = recorder if self.size > 1 else None
        self.is_inside = False  # a collective
        self.direct = self.size > 1 and recorder.transport == "gloo"
        self.swaps = self.direct and self.size == 2

    def _send(self, elements: int, x: Tensor) -> None:
        self.recorder.sent[self.axis] += elements * x.itemsize

    @contextmanager
    def _collective(self, operation: Operation, x: Tensor, share: float = 1.0) -> Iterator[None]:
        """Records a collective, and not what it is made of. Its size is `share` times the tensor's."""
        is_outermost, self.is_inside = not self.is_inside, True
        try:
            yield
        finally:
            self.is_inside = not is_outermost
        if is_outermost and self.size > 1:
            self.recorder.calls.append(Collective(self.axis, operation, share * x.numel() * x.itemsize))

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
        is_message = self.axis == "ring"
        with self._collective("send" if is_message else "all_to_all", x, 1.0 if is_message else self.size / max(1, self.size - 1)):
            return super().trade(out, x, out_sizes, in_sizes)

    def _native_all_to_all(self, out: Tensor, x: Tensor, *sizes: list[int]) -> None:
        self._send(sum(sizes[1]) if sizes else x.numel() * (self.size - 1) // self.size, x)

    def _native_all_gather(self, out: Tensor, x: Tensor) -> None:
        self._send(x.numel() * (self.size - 1), x)

    def _native_reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        self._send(x.numel() * (self.size - 1) // self.size, x)

    def _native_all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, later: bool = False) -> None:
        self._send(2 * x.numel() * (self.size - 1) // self.size, x)


class RecordedWorld:
    """One rank of a world whose others are not there."""

    def __init__(self, rank: int, recorder: TurnRecorder):
        self.rank, self.recorder = rank, recorder

    def group(self, ranks: tuple[int, ...], purpose: str = "") -> RecordedGroup:
        return RecordedGroup(ranks, self.rank, purpose, self.recorder)
