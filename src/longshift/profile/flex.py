"""FlexAttention as a kernel: measured beside the others, never chosen, as its backward takes no log-sum-exp from outside."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from longshift.model.kernels import Kernel, batched, flat


def flex(device: torch.device) -> Kernel:
    return Kernel("flex", _Flex(device), None)


class _Flex:
    """Compiled where it has a kernel; keeps the masks that it has made."""

    def __init__(self, device: torch.device):
        self.compiled = device.type == "cuda"
        self.attend: Any = torch.compile(flex_attention) if self.compiled else flex_attention
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile", category=UserWarning)
        self.masks: dict[tuple[int, int], Any] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        size = q.shape[0], k.shape[0]
        if causal and size not in self.masks:
            self.masks[size] = create_block_mask(_earlier, None, None, *size, device=q.device, _compile=self.compiled)
        mask = self.masks[size] if causal else None
        out, more = self.attend(
            *batched(q, k, v),
            block_mask=mask,
            scale=scale,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )
        return flat(out), flat(more.lse)


def _earlier(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
