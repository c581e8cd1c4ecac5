r"""Attention by a kernel that takes whole multiples of some number of tokens: most of a piece goes
to it, what remains to another kernel.

cuDNN plans anew for every shape, in a tenth of a second, so that it takes multiples of 1,024 tokens
only; most documents have another length.

                     keys
                     0       whole   S
        queries   0  \         |     |    A     the kernel
                       \       |  C  |    B     the other one, on fewer queries
                     A   \     |     |    C     on fewer keys; where the mask is causal, no query
              whole  _______\__|_____|          sees them
                  T       B    | D \ |    D     both; where it is, the corner is

The forward's parts are joined by their own log-sum-exps, in at least float32, and each backward
takes the whole one, as in ring attention. Gradients of a document in bf16 are sums of its parts' in
bf16. Letters as in `model.kernels`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longshift.model.kernels import Kernel, add_up, empty_output, merge


@dataclass(frozen=True)
class Multiples:
    """Attention by `kernel` on multiples of `every` tokens, and by `rest` on what remains."""

    kernel: Kernel
    rest: Kernel
    every: int

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Out, in the format of q, and lse."""
        if self.fits(q, k):
            return self.kernel.forward(q, k, v, causal, scale)
        out, lse = empty_output(q, q.dtype)
        self.fold(out, lse, q, k, v, causal, scale, first=True)
        return out, lse

    def fold(
        self,
        out: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float,
        first: bool,
    ) -> None:
        """As `model.attention.Attention.fold`."""
        for rows, parts in self._parts(q, k, causal):
            # Partial attentions are merged in at least float32, a single one needs no merge.
            sums = out[rows] if first and len(parts) == 1 else out[rows].to(lse.dtype)
            for number, (keys, kernel, hides) in enumerate(parts):
                merge(
                    sums,
                    lse[rows],
                    *kernel.forward(q[rows], k[keys], v[keys], hides, scale),
                    first and number == 0,
                )
            if sums.dtype != out.dtype:
                out[rows] = sums

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> Sequence[Tensor]:
        """Gradients (dq, dk, dv), in the format of their tensors, for a global `out` and `lse`."""
        if self.fits(q, k):
            return self.kernel.backward(grad, q, k, v, out, lse, causal, scale)
        # Keys get gradients from several parts, so all begin at zero.
        dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
        self.add(dq, dk, dv, grad, q, k, v, out, lse, causal, scale)
        return dq, dk, dv

    def add(
        self,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> None:
        """As `model.attention.Attention.add`."""
        for rows, parts in self._parts(q, k, causal):
            for keys, kernel, hides in parts:
                grads = kernel.backward(
                    grad[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], hides, scale
                )
                add_up((dq[rows], dk[keys], dv[keys]), grads)
                del grads  # freed before the next call allocates its own

    def fits(self, q: Tensor, k: Tensor) -> bool:
        """Whether nothing is left of either."""
        return len(q) % self.every == len(k) % self.every == 0

    def _parts(
        self, q: Tensor, k: Tensor, causal: bool
    ) -> Iterator[tuple[slice, list[tuple[slice, Kernel, bool]]]]:
        """Queries, and the keys that they see, by which kernel and whether it hides later ones."""
        for rows in self._split(len(q)):
            parts = []
            for keys in self._split(len(k)):
                # Under a causal mask no query sees keys that begin after it.
                if causal and keys.start > rows.start:
                    continue
                kernel = self.kernel if self.fits(q[rows], k[keys]) else self.rest
                hides_later = causal and keys == rows
                parts.append((keys, kernel, hides_later))
            yield rows, parts

    def _split(self, tokens: int) -> list[slice]:
        """The multiples of `every`, and what remains."""
        end = tokens - tokens % self.every
        return [part for part in (slice(0, end), slice(end, tokens)) if part.start < part.stop]


def cut(kernel: Kernel, rest: Kernel, every: int, min_tokens: int) -> Kernel:
    """`kernel` for pieces of any length: all of those of multiples of `every` queries and keys, and
    most of those with `min_tokens` or more; what remains of them, and other pieces,
    go to `rest`."""
    parts = Multiples(kernel, rest, every)

    def takes(q: Tensor, k: Tensor, causal: bool) -> bool:
        return parts.fits(q, k) or min(len(q), len(k)) >= min_tokens

    return replace(
        kernel,
        forward=parts.forward,
        backward=parts.backward,
        fold=parts.fold,
        add=parts.add,
        rest=rest,
        takes=takes,
        uncut=kernel,
    )
