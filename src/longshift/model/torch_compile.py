"""torch.compile as this package asks for it: for any number of tokens, in this process, and for as
many shapes as a model has."""

from collections.abc import Callable
from typing import Any

import torch

MAX_KERNELS = 64  # of a function, by width, strides and activation


def why(fault: Exception) -> str:
    """What torch says of a fault, in its first line that says something."""
    return next((line for line in str(fault).splitlines() if line.strip()), type(fault).__name__)


def compiled_for(function: Callable, num_token_arguments: int, **options: Any) -> Any:
    """`function`, compiled: the first dim of its first `num_token_arguments` arguments may have any
    size, and others are what they are. `options`: of torch.compile.

    torch keeps its settings by thread, and a backward on a GPU has a thread of its own: they are
    made in each call. In a pool of processes, which torch would start, some would outlive a rank
    that is killed.
    """
    kernel = torch.compile(function, **options)

    def call(*arguments: Any) -> Any:
        torch._inductor.config.compile_threads = 1  # pyright: ignore[reportAttributeAccessIssue]
        if torch._dynamo.config.recompile_limit < MAX_KERNELS:
            torch._dynamo.config.recompile_limit = MAX_KERNELS
        for tensor in arguments[:num_token_arguments]:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return kernel(*arguments)

    return call
