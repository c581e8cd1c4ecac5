"""Bytes of all tensors that are alive, by device, while a mode watches what torch's operations
return.

A storage is counted once, whatever views it has, from the operation that made it until it is gone.
Of what kernels need inside one operation, attention's backward on a GPU alone is counted; what an
allocator loses between tensors is not. Under the mode autograd adds two gradients that meet into a
new tensor, where without it may add in place: what is counted is never less than what is.
"""

import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HeldBytes(TorchDispatchMode):
    """Counts bytes of storages by device type: `now[device]`, and `most[device]` since `restart`.
    Mutable. What was there before it began is not counted. Only operations of the thread that
    entered it are seen; a storage may end in any."""

    def __init__(self) -> None:
        super().__init__()
        self.most: Counter[str] = Counter()
        self._now: Counter[str] = Counter()
        self._held: dict[int, _HeldStorage] = {}  # by address
        self._gone: deque[_HeldStorage] = deque()  # not yet taken off
        self._unseen = (  # what never reaches a dispatcher
            patch.object(torch, "from_numpy", self._from_numpy(torch.from_numpy)),
            patch.object(
                torch.UntypedStorage, "resize_", self._resize(torch.UntypedStorage.resize_)
            ),
        )

    def __enter__(self) -> "HeldBytes":
        for unseen in self._unseen:
            unseen.start()
        super().__enter__()
        return self

    def __exit__(self, kind: Any, fault: Any, trace: Any) -> None:
        super().__exit__(kind, fault, trace)
        for unseen in self._unseen:
            unseen.stop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        input_storages = {x.untyped_storage()._cdata for x in inputs}
        for x in inputs:
            self._see(x, new=False)
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                # Else it is a view, or was changed in place.
                is_new = x.untyped_storage()._cdata not in input_storages
                self._see(x, new=is_new)
        if "flash_attention_backward" in func._opname and args[1].device.type != "cpu":
            q, k = args[1:3]
            peak_bytes = self.now[q.device.type] + flash_backward_bytes(q, k)
            self.most[q.device.type] = max(self.most[q.device.type], peak_bytes)
        return out

    @property
    def now(self) -> Counter[str]:
        """Bytes by device type."""
        while self._gone:
            held = self._gone.popleft()
            self._now[held.device] -= held.size
            if self._held.get(held.address) is held:
                del self._held[held.address]
        return self._now

    def restart(self) -> None:
        """Forget what was the most: it is what there is now."""
        self.most = Counter(self.now)

    def _see(self, tensor: Tensor, new: bool) -> None:
        storage = tensor.untyped_storage()
        held = self._held.get(storage._cdata)
        if held is None or held.storage() is not storage:  # an address is used again
            if not new:
                return
            held = self._held[storage._cdata] = _HeldStorage(
                storage._cdata, weakref.ref(storage), tensor.device.type
            )
            weakref.finalize(storage, self._gone.append, held)
        self._size(held, storage)

    def _size(self, held: "_HeldStorage", storage: torch.UntypedStorage) -> None:
        now = self.now
        size = storage.nbytes()
        now[held.device] += size - held.size
        held.size = size
        self.most[held.device] = max(self.most[held.device], now[held.device])

    def _resize(self, native: Any) -> Any:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = native(storage, size)
            held = self._held.get(storage._cdata)
            if held is not None and held.storage() is storage:
                self._size(held, storage)
            return result

        return resize_

    def _from_numpy(self, native: Any) -> Any:
        def from_numpy(array: Any) -> Tensor:
            tensor = native(array)
            self._see(tensor, new=True)
            return tensor

        return from_numpy


def flash_backward_bytes(q: Tensor, k: Tensor) -> int:
    """Bytes that FlashAttention-2 holds inside its backward (`mha_bwd` of its flash_api.cpp):
    gradients of queries in float32, a float32 for every query and head, and where query heads share
    keys, gradients of keys and values for every query head. Heads are the second dim of [1, N, T,
    H] and of [T, N, H]."""
    query_bytes = 4 * (q.numel() + q.numel() // q.shape[-1])
    if q.shape[1] == k.shape[1]:
        return query_bytes
    head_elements = k.numel() // k.shape[1]
    return query_bytes + 2 * k.itemsize * head_elements * q.shape[1]


@dataclass(eq=False)
class _HeldStorage:
    """A storage that is counted. `device`: its tensor's, as a fake tensor's storage has none."""

    address: int
    storage: "weakref.ref[torch.UntypedStorage]"
    device: str
    size: int = 0


@contextmanager
def prompt_release() -> Iterator[None]:
    """Inside, an asynchronous collective has let go of its tensors when its `wait` returns. [Note:
    late release] gloo's threads hold them for a moment longer, which on a busy machine is long
    enough to be counted."""
    with patch.object(dist, "all_to_all_single", _prompt(dist.all_to_all_single)):
        yield


@dataclass
class _PromptWork:
    """A work that ends when nothing of it is left. `counts`: references to its `tensors` before it
    began."""

    work: dist.Work | None
    tensors: tuple[Tensor, ...]
    counts: tuple[int, ...]

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None
            tensors: Any = self.tensors
            while any(x._use_count() > count for x, count in zip(tensors, self.counts)):
                time.sleep(0)
            time.sleep(1e-4)  # what ends with the work itself has no count
            self.tensors = ()

    def is_completed(self) -> bool:
        return self.work is None or self.work.is_completed()


def _prompt(native: Callable[..., Any]) -> Callable[..., Any]:
    def all_to_all_single(out: Tensor, x: Tensor, *sizes: Any, **options: Any) -> Any:
        counts = tuple(t._use_count() for t in (out, x))  # pyright: ignore
        work = native(out, x, *sizes, **options)
        return _PromptWork(work, (out, x), counts) if options.get("async_op") else work

    return all_to_all_single
