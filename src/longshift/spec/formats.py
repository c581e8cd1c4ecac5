"""Number formats of a run: what its working copies compute in, what home keeps and sums in, what
travels between them. Names of dtypes are torch's."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

WeightFormat = Literal["float32", "bf16", "fp16", "float64"]
PrecisionName = Literal[WeightFormat, "float8"]
MomentFormat = Literal["float32", "bf16", "float8"]
GradientWire = Literal["float32", "bf16", "float8"]
WeightWire = Literal["compute", "float8"]
SCALE_EVERY = 128  # elements of a row that share a scale, where numbers have eight bits
LARGEST = 448.0  # of e4m3
LEAST_SCALE = 2.0**-126

EIGHT_BITS = (
    "factors of blocks' matmuls have eight bits: Hopper GPUs multiply their codes where sides of"
    " weights are multiples of 128; elsewhere they are rounded and multiplied in the compute format"
)

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Wire:
    """Formats in which fused collectives send `gradients`, float32 being the home format, and
    `weights`, `compute` being that of working copies."""

    gradients: GradientWire = "float32"
    weights: WeightWire = "compute"

    @property
    def coded(self) -> bool:
        """Whether something is sent in another format than it is kept in."""
        return self != Wire()

    def bytes_of(self, what: Literal["gradients", "weights"], wide_bytes: int) -> float:
        """Bytes of an element on the wire, with its part of a scale; `wide_bytes`: of an element
        that is sent as it is."""
        return {"bf16": 2, "float8": 1 + 4 / SCALE_EVERY}.get(getattr(self, what), wide_bytes)


@dataclass(frozen=True)
class Format:
    """`compute`: dtype of working copies and activations; `home`: of masters and gradient sums.
    There are so many `moments`, `packed` into bf16 or float8 between updates, or else of the home
    format. `wire`: how weights and gradients travel; `float8`: whether matmuls of blocks take
    factors of eight bits (`model.float8`)."""

    compute: str
    home: str
    moments: int = 2
    packed: MomentFormat = "float32"
    wire: Wire = Wire()
    float8: bool = False

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element of the working copies."""
        return _BYTES[self.compute]

    @property
    def home_bytes(self) -> int:
        """Bytes of an element at home."""
        return _BYTES[self.home]

    @property
    def scaled(self) -> bool:
        """Whether gradients are scaled, lest they vanish in float16."""
        return self.compute == "float16"

    @property
    def moment_bytes(self) -> float:
        """Bytes of an element of one moment between updates, with its part of a scale; rows are as
        long as their blocks."""
        return {"float32": self.home_bytes, "bf16": 2, "float8": 1 + 4 / SCALE_EVERY}[self.packed]


def adds_inside(compute_bytes: int, sum_bytes: int, on_gpu: bool) -> bool:
    """Whether matmuls add the gradients of weights to their sums as they form them: those of GPUs
    do, those of CPUs to sums of the factors' own format."""
    return on_gpu or compute_bytes == sum_bytes


def arithmetic(precision: str) -> str:
    """The precision whose rates of a machine a run has: rounded to eight bits, factors are
    multiplied in bf16 (`model.float8`)."""
    return "bf16" if precision == "float8" else precision


def formats_of(
    precision: str,
    moments: int = 2,
    packed: MomentFormat = "float32",
    wire: Wire = Wire(),
) -> Format:
    """The formats of a run whose optimizer keeps so many moments, packed so, and whose weights and
    gradients travel so."""
    return replace(FORMATS[precision], moments=moments, packed=packed, wire=wire)


FORMATS: Mapping[str, Format] = {
    "float32": Format("float32", "float32"),
    "bf16": Format("bfloat16", "float32"),
    "fp16": Format("float16", "float32"),
    "float64": Format("float64", "float64"),
    "float8": Format("bfloat16", "float32", float8=True),
    # How `longshift check` computes a run in float8.
    "float64-float8": Format("float64", "float64", float8=True),
}
