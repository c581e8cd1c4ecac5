"""Bytes of all tensors that are alive, by device, while a mode watches what torch's operations return.

A storage is counted once, whatever views it has, from the operation that made it until it is gone. Not counted: what kernels need inside one
operation, and what an allocator loses between tensors. Under the mode autograd adds two gradients that meet into a new tensor, where without
it may add in place: what is counted is never less than what is.
"""

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HeldBytes(TorchDispatchMode):
    """Counts bytes of storages by device type: `now[device]`, and `most[device]` since `restart`. Mutable. What was there before it began
    counts from `adopt` on. Only operations of the thread that entered it are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self._sizes: dict[int, int] = {}  # by storage, as of when it was last seen
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = {}  # and device: the tensor's, as a fake one's storage has none
        self._numpy = patch.object(torch, "from_numpy", self._from_numpy(torch.from_numpy))  # it never reaches a dispatcher

    def __enter__(self) -> "HeldBytes":
        self._numpy.start()
        super().__enter__()
        return self

    def __exit__(self, *how: Any) -> None:
        super().__exit__(*how)
        self._numpy.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        before = {x.untyped_storage()._cdata for x in given}
        for x in given:
            self._see(x, new=False)
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._see(x, new=x.untyped_storage()._cdata not in before)  # else a view, or changed in place
        return out

    def restart(self) -> None:
        """Forget what was the most: it is what there is now."""
        self.refresh()
        self.most = Counter(self.now)

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Count these from now on."""
        for tensor in tensors:
            self._see(tensor, new=True)

    def refresh(self) -> None:
        """Look again at every storage: `resize_` of a storage is no operation of torch's."""
        for reference, device in list(self._alive.values()):
            if (storage := reference()) is not None:
                self._size(storage, device)

    def _see(self, tensor: Tensor, new: bool) -> None:
        storage, device = tensor.untyped_storage(), tensor.device.type
        if new and storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = 0
            self._alive[storage._cdata] = weakref.ref(storage), device
            weakref.finalize(storage, self._gone, storage._cdata, device)
        if storage._cdata in self._sizes:
            self._size(storage, device)

    def _size(self, storage: torch.UntypedStorage, device: str) -> None:
        size = storage.nbytes()
        self.now[device] += size - self._sizes[storage._cdata]
        self._sizes[storage._cdata] = size
        self.most[device] = max(self.most[device], self.now[device])

    def _gone(self, address: int, device: str) -> None:
        self.now[device] -= self._sizes.pop(address)
        del self._alive[address]

    def _from_numpy(self, native: Any) -> Any:
        def from_numpy(array: Any) -> Tensor:
            tensor = native(array)
            self._see(tensor, new=True)
            return tensor

        return from_numpy


@contextmanager
def prompt_release() -> Iterator[None]:
    """Inside, an asynchronous collective has let go of its tensors when its `wait` returns. [Note: late release] gloo's threads hold them for
    a moment longer, which on a busy machine is long enough to be counted."""
    with patch.object(dist, "all_to_all_single", _prompt(dist.all_to_all_single)):
        yield


class _PromptWork:
    """A work that ends when nothing of it is left."""

    def __init__(self, work: dist.Work, tensors: tuple[Tensor, ...], counts: tuple[int, ...]):
        self.work, self.tensors, self.counts = work, tensors, counts

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None
            while any(x._use_count() > count for x, count in zip(self.tensors, self.counts)):  # pyright: ignore[reportAttributeAccessIssue]
                time.sleep(0)
            self.tensors = ()

    def is_completed(self) -> bool:
        return self.work is None or self.work.is_completed()


def _prompt(native: Callable[..., Any]) -> Callable[..., Any]:
    def all_to_all_single(out: Tensor, x: Tensor, *sizes: Any, **how: Any) -> Any:
        counts = tuple(t._use_count() for t in (out, x))  # pyright: ignore[reportAttributeAccessIssue]
        work = native(out, x, *sizes, **how)
        return _PromptWork(work, (out, x), counts) if how.get("async_op") else work

    return all_to_all_single
