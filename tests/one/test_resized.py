"""Storage that comes and goes: what lies in it is what was put there, and large storage is in large pages each time that it comes."""

import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longshift.dist.world import LARGE
from longshift.state import resizable
from longshift.state.resizable import ResizableStorage

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags(tensor: Tensor) -> set[str]:
    """What the kernel knows of the memory in the middle of a tensor, as /proc/self/smaps tells it."""
    middle, here = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(" ", 1)[0]
        if "-" in first:
            start, end = (int(word, 16) for word in first.split("-"))
            here = start <= middle < end
        elif here and first == "VmFlags:":
            return set(line.split()[1:])
    raise AssertionError("no such memory")


def test_views_are_valid_whenever_there_is_storage():
    flat = torch.arange(LARGE // 4, dtype=torch.float32)
    last, memory = flat[-3:], ResizableStorage(flat)
    memory.hold()
    assert last.tolist() == [LARGE // 4 - 3, LARGE // 4 - 2, LARGE // 4 - 1]
    for value in (1.0, 2.0):
        memory.drop()
        assert not memory.held
        memory.hold()
        flat.fill_(value)
        assert last.tolist() == [value] * 3


def test_large_storage_asks_for_large_pages_each_time_that_it_comes(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resizable, "in_large_pages", lambda address, size: asked.append((address, size)))
    large, small = torch.empty(LARGE // 4), torch.empty(LARGE // 4 - 1)
    for count in (1, 2):
        for flat in (large, small):
            memory = ResizableStorage(flat)
            memory.drop()
            memory.hold()
            memory.hold()
        assert len(asked) == count
        assert asked[-1] == (large.data_ptr(), LARGE)


@pytest.mark.skipif(not HUGE.is_file() or "[never]" in HUGE.read_text(), reason="the kernel has no large pages")
def test_the_kernel_gives_large_pages_to_what_asks():
    """The memory is mapped here: what the C library gives may lie in a heap that has large pages already."""
    mapped = torch.frombuffer(mmap.mmap(-1, LARGE), dtype=torch.uint8)
    assert "hg" not in flags(mapped)
    resizable.in_large_pages(mapped.data_ptr() + 1000, LARGE - 1000)
    assert "hg" in flags(mapped)
