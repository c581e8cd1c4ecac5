"""Habits: how a run computes and what it sends, as far as that takes seconds."""

import re
from dataclasses import dataclass

from longshift.cluster.cluster import Device
from longshift.spec.formats import FORMATS, Wire, adds_inside
from longshift.weigh.weight_memory import gradient_passes, weight_passes

# Names of devices.
HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")
CUDNN = re.compile(r"\b(G?H(20|100|200|800)|G?B[123]00)\b")


@dataclass(frozen=True)
class Habits:
    """How a run computes and what it sends, as far as that takes seconds.

    compiled                    elementwise operations of norms, rotary embedding, gates and the
                                loss are one kernel each
    accumulated                 gradients of matmuls are added to their sum in a pass of its own,
                                else where they are made
    rounded                     matmuls of blocks take factors of eight bits
    codes                       those factors are multiplied as codes (`model.float8`), else rounded
    cudnn                       on a preset, attention to documents and pieces of at least LONG
                                tokens, or of whole multiples of EVEN, goes to a kernel that is as
                                much faster as CUDNN_GAINS says, but for what is left of EVEN
                                (`model.cut`); a profile has its curve
    gathered, reduced           bytes of weights, and of gradient sums, on the wire over those where
                                they are kept
    gather_coded, reduce_coded  bytes that a rank reads and writes for each element that it gathers,
                                or reduces, in another format than it is kept in; then gradients go
                                by an all-to-all
    gradient_bytes              of an element of gradient sums
    moments                     that an update reads and writes of each weight
    """

    compiled: bool = False
    accumulated: bool = False
    rounded: bool = False
    codes: bool = False
    cudnn: bool = False
    gathered: float = 1.0
    reduced: float = 1.0
    gather_coded: float = 0.0
    reduce_coded: float = 0.0
    gradient_bytes: float = 4.0
    moments: int = 2


def habits(
    compile: bool,
    precision: str,
    device: Device,
    wire: Wire = Wire(),  # noqa: B008  (frozen)
    moments: int = 2,
) -> Habits:
    """Those of a run with `train.compile` or without, in this precision on this device, with these
    formats on the wire, and so many moments of a weight."""
    weight_bytes = FORMATS[precision].compute_bytes
    sum_bytes = FORMATS[precision].home_bytes
    is_hopper = HOPPER.search(device.name) is not None
    has_cudnn = CUDNN.search(device.name) is not None
    rounded = FORMATS[precision].float8
    return Habits(
        compiled=compile,
        accumulated=not adds_inside(weight_bytes, sum_bytes, device.kind == "cuda"),
        rounded=rounded,
        codes=rounded and is_hopper,
        cudnn=weight_bytes == 2 and has_cudnn,
        gathered=wire.bytes_of("weights", weight_bytes) / weight_bytes,
        reduced=wire.bytes_of("gradients", sum_bytes) / sum_bytes,
        # What is sent is a share of what is taken.
        gather_coded=float(weight_passes(wire, weight_bytes, sum_bytes)[1]),
        reduce_coded=float(sum(gradient_passes(wire, sum_bytes))),
        gradient_bytes=float(sum_bytes),
        moments=moments,
    )
