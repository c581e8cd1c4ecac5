"""Number formats of a run: what its working copies compute in, and what home keeps and sums in. Names of dtypes are torch's."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

PrecisionName = Literal["float32", "bf16", "fp16", "float64"]

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Format:
    """`compute`: dtype of working copies and activations; `home`: of masters, gradient sums and moments, of which there are `moments`."""

    compute: str
    home: str
    moments: int = 2

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element of the working copies."""
        return _BYTES[self.compute]

    @property
    def home_bytes(self) -> int:
        """Bytes of an element at home."""
        return _BYTES[self.home]


def formats_of(precision: str, moments: int = 2) -> Format:
    """The formats of a run whose optimizer keeps so many moments."""
    return replace(FORMATS[precision], moments=moments)


FORMATS: Mapping[str, Format] = {
    "float32": Format("float32", "float32"),
    "bf16": Format("bfloat16", "float32"),
    "fp16": Format("float16", "float32"),
    "float64": Format("float64", "float64"),
}
