"""Which number formats a run uses, and dynamic loss scaling for float16.

Weights are kept, gradients summed and moments updated in the home format; copies compute in the
compute format. Paper: Mixed Precision Training (arXiv 1710.03740).
"""

from dataclasses import dataclass

import torch

from longshift.spec.formats import FORMATS, PrecisionName, Wire


@dataclass(frozen=True)
class Precision:
    """The number formats of a run. `compute`: of working copies and activations; `home`: of
    masters, gradient sums and moments; `wire`: of what travels between them; `float8`: whether
    matmuls of blocks take factors of eight bits."""

    compute: torch.dtype
    home: torch.dtype
    wire: Wire = Wire()  # noqa: RUF009  (frozen)
    float8: bool = False

    @classmethod
    def of(cls, name: PrecisionName, wire: Wire = Wire()) -> "Precision":  # noqa: B008  (frozen)
        formats = FORMATS[name]
        compute = getattr(torch, formats.compute)
        home = getattr(torch, formats.home)
        return cls(compute, home, wire, formats.float8)

    @property
    def scaled(self) -> bool:
        """Whether a loss scale is needed: the exponent of float16 gradients ends at 2^-24."""
        return self.compute == torch.float16


@dataclass
class LossScale:
    """The factor on the loss. Mutable. Halved when a gradient overflows (the step is skipped),
    doubled after `patience` good steps."""

    scale: float = 2.0**16
    good_steps: int = 0
    patience: int = 2000

    def update(self, finite: bool) -> None:
        self.good_steps = self.good_steps + 1 if finite else 0
        # Powers of two, so that a scale and its inverse round nothing.
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps == self.patience:
            self.scale *= 2
            self.good_steps = 0
