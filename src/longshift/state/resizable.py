"""A tensor whose storage comes and goes: views of it are made once, while there is storage, and are
valid whenever there is again.

Torch refuses to make a view of a tensor whose storage is too small for it; views that exist already
are left alone.

[Note: large pages] The C library mostly maps what is large anew each time, and the kernel gives
every page of it at its first use. In pages of 4 KiB a GiB cost 0.4 to 0.9 s of a processor where
this was measured, as long as a fast disk takes for it; in pages of 2 MiB 0.1 to 0.3 s. The kernel
is asked for these.
"""

import ctypes
import mmap
import sys
from collections.abc import Mapping
from math import prod
from typing import Generic, TypeVar

import torch
from torch import Tensor

from longshift.dist.world import LARGE

Key = TypeVar("Key")


class ResizableStorage:
    """A tensor that has storage between `hold` and `drop`. Mutable."""

    def __init__(self, flat: Tensor):
        self.flat = flat
        self.bytes = flat.untyped_storage().nbytes()

    def hold(self) -> None:
        """Have storage; contents are undefined where there was none."""
        if not self.held:
            storage = self.flat.untyped_storage()
            storage.resize_(self.bytes)
            if self.bytes >= LARGE and self.flat.device.type == "cpu":
                in_large_pages(storage.data_ptr(), self.bytes)

    def drop(self) -> None:
        self.flat.untyped_storage().resize_(0)

    @property
    def held(self) -> bool:
        return self.flat.untyped_storage().nbytes() == self.bytes


class Tensors(ResizableStorage, Generic[Key]):
    """Tensors of these shapes, one after another in memory that comes and goes. Mutable. `views`:
    by key; they have a version counter beside that of `flat`."""

    def __init__(
        self, shapes: Mapping[Key, tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ):
        sizes = [prod(shape) for shape in shapes.values()]
        super().__init__(torch.empty(sum(sizes), dtype=dtype, device=device))
        # `data` has a version counter of its own: see [Note: released storage] of `state.copies`.
        parts = self.flat.data.split(sizes)
        self.views = {key: part.view(shape) for (key, shape), part in zip(shapes.items(), parts)}


def in_large_pages(address: int, size: int) -> None:
    """Advise the kernel to take large pages for `size` bytes from `address` on; the kernel need not
    follow it."""
    if sys.platform == "linux":
        # The kernel takes whole pages alone.
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_HUGEPAGE
        )
