"""What torch's operations make of tensors of the `meta` device, which have shapes and no storage.

[Note: meta kernels] Torch's are Python for many operations, and take up to a millisecond where a
dispatch takes ten microseconds. What they make depends on shapes and formats alone, so that each
is asked once. Elementwise ones are marked for torch's compiler to leave alone
(`torch._compile._disable_dynamo`): their first call imports the compiler, which takes a second,
to be told so, and torch has no switch for it. Where nothing is compiled, a stand-in answers.
"""

import sys
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

META = torch.device("meta")


class TensorShape(NamedTuple):
    """What decides which tensor an operation makes of this one."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Scalar(NamedTuple):
    """Another argument. 1, 1.0 and True are equal, and make tensors of different formats."""

    type: type
    value: Any


def call_meta_kernel(func: Any, args: tuple, kwargs: dict) -> Any:
    """New results of an operation that writes no argument in place. [Note: meta kernels]"""
    return _make(_result(func, _describe(args), _describe(tuple(kwargs.items()))))


def _describe(value: Any) -> Any:
    """The arguments, or results, of an operation as a value that can be compared."""
    if isinstance(value, Tensor):
        return TensorShape(value.shape, value.stride(), value.dtype)
    if isinstance(value, tuple | list):
        return tuple(map(_describe, value))
    return Scalar(type(value), value)


def _make(described: Any) -> Any:
    """New arguments, or results, of this description."""
    match described:
        case TensorShape():
            return torch.empty_strided(
                described.size, described.stride, dtype=described.dtype, device=META
            )
        case Scalar():
            return described.value
    return tuple(map(_make, described))


class NoCompiler:
    """What meta kernels ask of `torch._dynamo`."""

    @staticmethod
    def disable(function: Any, *how: Any, **options: Any) -> Any:
        return function


@lru_cache(maxsize=1 << 16)
def _result(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation makes of arguments with these descriptions. [Note: meta kernels]"""
    modules: dict[str, Any] = sys.modules
    compiler = modules.setdefault("torch._dynamo", NoCompiler)
    try:
        return _describe(func(*_make(args), **dict(_make(kwargs))))
    finally:
        # A later torch.compile in this process imports the true one.
        if compiler is NoCompiler:
            del modules["torch._dynamo"]
