"""A device that is not the CPU, where there is none: torch's fake tensors have shapes, dtypes and devices but no numbers. The trainer runs
as it is, but for what asks a GPU for numbers. What is seen: operations on tensors of two devices, or with arguments that their GPU kernel
does not take, which are errors as on a GPU; and the bytes that tensors take there."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from longshift.dist.live_bytes import HeldBytes
from longshift.dist.world import World
from longshift.model import experts
from longshift.model.chosen_kernel import kernels
from longshift.model.kernels import Kernel
from longshift.spec.model import attended
from longshift.step import player
from longshift.stream import disk_file, gpu_tiers

NAME = "gpu"
FLASH = kernels(torch.device("cuda"), torch.bfloat16)[0]
ALLOCATE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach")  # no kernel runs


class Stream:
    """Of a device on which nothing takes time. Mutable: `kept`, tensors that `record_stream` has named since the last event. They are held
    until the host waits for that event, as by a device that falls behind."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def record_event(self) -> "Stream":
        event = Stream()
        event.kept, self.kept = self.kept, event.kept
        return event

    def synchronize(self) -> None:
        self.kept.clear()


def _dropped(native: Callable) -> Callable:
    """`HostTier.drop`: what all came back had been sent before."""

    def drop(tier: gpu_tiers.HostTier, key: tuple) -> None:
        native(tier, key)
        if not tier.objects:
            for event, *_ in tier.under_way:
                event.synchronize()

    return drop


class AtOnce:
    """A pool of threads that does everything itself, at once: what is asked of tensors in it is seen."""

    def __init__(self, *how: object): ...

    def submit(self, work: Callable, *arguments: object) -> Future:
        done = Future()
        try:
            done.set_result(work(*arguments))
        except Exception as fault:
            done.set_exception(fault)
        return done

    def shutdown(self, **how: object) -> None: ...


class Held(HeldBytes):
    """Bytes of tensors by device, and what operations on this one did since `restart`. Mutable."""

    def restart(self) -> None:
        super().restart()
        self.work = {"attention_flops": 0, "matmul_flops": 0, "other_bytes": 0, "operations": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if not (func.is_view or func.namespace == "prim" or func._opname in ALLOCATE):
            there = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.device.type == NAME]
            self._work(func, args, kwargs or {}, out, there)
        return out

    def _work(self, func: Any, args: tuple, kwargs: dict, out: Any, there: list[Tensor]) -> None:
        """FLOPs, causal scores counted once, or else the bytes of arguments and results."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)] + there
        if not tensors or any(x.device.type != NAME for x in tensors):  # nothing there, or a copy from or to the host
            return
        self.work["operations"] += 1
        of_documents = kwargs.get("window_size_left") is not None or any(x.dtype == torch.int32 and x.numel() > 2 for x in tensors)
        if "_flash_attention" in func._opname and of_documents:
            return  # their lengths are numbers of a tensor: `told`
        if (flops := flop_registry.get(func._overloadpacket)) is not None:
            attention = "attention" in func._opname
            found = flops(*args, **kwargs, out_val=out) // (2 if attention and any(x is True for x in args) else 1)
            self.work["attention_flops" if attention else "matmul_flops"] += found
        else:
            self.work["other_bytes"] += sum(x.numel() * x.itemsize for x in tensors)

    def wider(self, native: Any) -> Any:
        """A matmul that adds to a sum of a wider format, for which fake tensors have no kernel: its shapes are checked, its FLOPs told."""

        def call(total: Tensor, left: Tensor, right: Tensor, *wider: torch.dtype, **how: Any) -> Tensor:
            if not wider:
                return native(total, left, right, **how)
            assert how["out"].dtype == total.dtype == wider[0] == torch.float32
            assert left.dtype == right.dtype
            native(*(torch.empty(x.shape, device="meta") for x in (total, left, right)))
            self.work["matmul_flops"] += 2 * total.numel() * left.shape[-1]
            self.work["operations"] += 1
            return how["out"]

        return call

    def told(self, kernel: Kernel) -> Kernel:
        """The kernel, whose packed form tells the FLOPs of its calls."""
        packed = kernel.packed
        if packed is None:
            return kernel

        def forward(q: Tensor, *given: Any) -> Any:
            self._attention(4, q, *given[3:5])
            return packed.forward(q, *given)

        def backward(grad: Tensor, q: Tensor, *given: Any) -> Any:
            self._attention(10, q, *given[5:7])
            return packed.backward(grad, q, *given)

        return replace(kernel, packed=replace(packed, forward=forward, backward=backward))

    def _attention(self, times: int, q: Tensor, lengths: Sequence[int], window: int | None) -> None:
        self.work["attention_flops"] += int(times * q.shape[1] * q.shape[2] * sum(attended(length, window) for length in lengths))


@contextlib.contextmanager
def fake_device(kernel: Kernel = FLASH) -> Iterator[tuple[torch.device, Held]]:
    """Inside, tensors are fake and attention goes to `kernel`. The device's name stays known to the process."""
    if not hasattr(torch, NAME):
        backend_registration._setup_privateuseone_for_python_backend(NAME)
    runtime, held = SimpleNamespace(cudaHostRegister=lambda *how: 0, cudaHostUnregister=lambda address: 0), Held()
    held.restart()
    with (
        patch.multiple(torch.cuda, Stream=lambda device: Stream(), current_stream=lambda device: Stream(), cudart=lambda: runtime),
        patch.multiple(torch.cuda, stream=contextlib.nullcontext, synchronize=lambda device: None),
        patch.multiple(torch.Tensor, record_stream=lambda x, stream: stream.kept.append(x), data_ptr=lambda x: id(x)),
        patch.object(gpu_tiers.HostTier, "drop", _dropped(gpu_tiers.HostTier.drop)),
        patch.object(disk_file, "ThreadPoolExecutor", AtOnce),
        patch.object(gpu_tiers, "bytes_of", lambda tensor: memoryview(b"")),  # nothing goes to the disk
        patch.object(gpu_tiers, "_pages", lambda size: torch.empty(size, dtype=torch.uint8)),
        patch.object(torch, "tensor", _tensor),
        patch.multiple(torch, addmm=held.wider(torch.addmm), baddbmm=held.wider(torch.baddbmm)),
        patch.object(FakeTensor, "tolist", lambda x: [1.0] * x.numel()),  # the loss and the norm, once a step
        patch.object(FakeTensor, "__int__", lambda x: 1, create=True),  # what ranks agree on about a switch, once a plan
        patch.object(experts, "row_ends", experts.even_ends),  # how many tokens a router sends to each expert
        patch.object(World, "gather_text", lambda world, text: [text] * world.size),
        patch.object(player, "choose", lambda *how: (held.told(kernel), "")),
        FakeTensorMode(),
        held,
    ):
        yield torch.device(NAME, 0), held


def _tensor(data: Any, dtype: torch.dtype | None = None, device: Any = "cpu") -> Tensor:
    """torch.tensor without its numbers: the real one wants memory on the device."""
    found = np.asarray(data)
    return torch.empty(found.shape, dtype=dtype or (torch.int64 if found.dtype.kind == "i" else None), device=device)
