"""A machine in numbers: nodes, devices, memories, links, and how long operations take on it.

Two kinds of knowledge, each number with its source. *Curves* are measured by `longshift profile`.
*Constants* are a datasheet's, with the share of each that is reached in practice. A question is
answered from a curve where there is one; a preset of published numbers holds no curves, and
`simulate.rates` says what a step reaches of its constants.

Levels of links, each one way and per device: `device` to its host's memory, `node` to a device of
the same node, `network` to another node's. bytes of a collective: the whole buffer, that a rank
ends up with (all_gather), starts with (reduce_scatter, all_to_all) or both (all_reduce); the
message of a send.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np

from longshift.cluster.curves import Curve
from longshift.errors import UsageError

Level = Literal["device", "node", "network"]
Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
Direction = Literal["forward", "backward"]
Number = float | np.ndarray

OPERATIONS: tuple[Operation, ...] = get_args(Operation)
# Curves of what cores do, and the rates that they show.
RATES = {"matmul": "matmul", "attention": "attention", "elementwise": "memory"}
# Figures that a calibration may move.
MOVED = ("matmul", "attention", "memory", "node", "network", "launch")
SHARES = (
    "matmul",
    "attention forward",
    "attention backward",
    "memory",
    "device link",
    "node link",
    "network link",
)


class Exact:
    """A part of a file that pydantic reads without a word that it does not know."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}


@dataclass(frozen=True)
class Device(Exact):
    """What one rank computes on. `flops_per_s`: dense peak by dtype. `launch_s`: least time between
    two operations. `cores`: processor cores that the rank's own process gets, which on a CPU are
    the device. `watts`: the power limit. `multiprocessors`: of a GPU."""

    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: float
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    launch_s: float
    cores: float | None = None
    watts: float | None = None
    multiprocessors: float | None = None


@dataclass(frozen=True)
class Link(Exact):
    """One way, per device, both ways at once unless a curve says otherwise."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Disk(Exact):
    """Of one node."""

    bytes: float
    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True)
class Heads:
    """Heads of an attention: query heads, key/value heads, width of each."""

    query: int
    key: int
    width: int

    def __str__(self) -> str:
        return f"{self.query}/{self.key}x{self.width}"

    @classmethod
    def parse(cls, text: str) -> "Heads":
        return cls(*map(int, re.split("[/x]", text)))


@dataclass(frozen=True)
class Backend(Exact):
    """An attention kernel as this machine has it. `why_not`: empty where it runs. `lse`: it returns
    the log-sum-exp; `global_lse`: its backward takes the output and log-sum-exp of a larger
    attention, which ring attention and streaming need. Errors are relative, to float64."""

    name: str
    dtype: str
    why_not: str = ""
    lse: bool = False
    global_lse: bool = False
    forward_error: float | None = None
    backward_error: float | None = None

    @property
    def legal(self) -> bool:
        """Whether ring attention and streaming can use it."""
        return not self.why_not and self.lse and self.global_lse


@dataclass(frozen=True)
class Calibration(Exact):
    """What the steps of a run showed of a cluster. `constants`: what they reach of its figures, as
    in `Cluster.moved`; `band`: relative half-width of a predicted step; `fingerprint`: of the
    figures (`files.figures`); `layouts`: of the run; `errors`: measured over predicted seconds,
    less 1, of each step by what the others showed."""

    constants: Mapping[str, float]
    band: float
    fingerprint: str
    layouts: tuple[str, ...]
    errors: tuple[float, ...]


class AttentionOf(NamedTuple):
    """Which attention was measured. `shape`: causal or full."""

    backend: str
    dtype: str
    direction: str
    shape: str
    heads: Heads


# What is taken where a format was not measured, and how many times slower it is then. A register
# holds half as many float64 numbers.
STAND_INS: Mapping[str, tuple[tuple[str, float], ...]] = {
    "float64": (("float32", 2.0),),
    "fp16": (("bf16", 1.0), ("float32", 1.0)),
    "bf16": (("fp16", 1.0), ("float32", 1.0)),
    "float32": (),
}


@dataclass(frozen=True)
class Cluster(Exact):
    """`shares`: what part of a constant is reached, by the names in SHARES; 1 where the constants
    are measured. `sources`: where each constant comes from, by its path, as in `device.launch_s`.
    `facts`: hardware and software that the numbers hold for. `calibration`: what steps of a run
    reach of the other figures, in which it is not contained."""

    name: str
    origin: Literal["measured", "published"]
    nodes: int
    devices_per_node: int
    device: Device
    host_bytes: float
    links: Mapping[Level, Link]
    shares: Mapping[str, float]
    sources: Mapping[str, str]
    disk: Disk | None = None
    curves: Mapping[str, Curve] = field(default_factory=dict)
    backends: tuple[Backend, ...] = ()
    facts: Mapping[str, str | int | float] = field(default_factory=dict)
    calibration: Calibration | None = None

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def calibrated(self) -> "Cluster":
        """The machine with the figures that its calibration says, itself where there is none. The
        band stays; no constant is left to apply."""
        if self.calibration is None:
            return self
        return replace(
            self.moved(self.calibration.constants),
            calibration=replace(self.calibration, constants={}),
        )

    def moved(self, constants: Mapping[str, float]) -> "Cluster":
        """The machine with other figures, by the names in MOVED: so many times the rates of matmul,
        attention, memory, node (links inside) and network (links between), so many times the
        seconds of a launch."""
        shares = {}
        for name, share in self.shares.items():
            shares[name] = share * constants.get(name.split()[0], 1.0)

        # A collective moves with its level of link, another operation with what its cores do.
        curves = {}
        for name, curve in self.curves.items():
            operation, *words = name.split()
            figure = words[0] if operation in OPERATIONS else RATES.get(operation, "")
            curves[name] = curve.slower(1.0 / constants.get(figure, 1.0))
        device = replace(self.device, launch_s=self.device.launch_s * constants.get("launch", 1.0))
        return replace(self, shares=shares, curves=curves, device=device)

    def with_arithmetic(self, dtype: str) -> "Cluster":
        """The machine with rates of arithmetic in `dtype`, itself where it has them.

        A profile of a CPU lacks float64 and fp16. Those of another format stand in, at the speed
        that STAND_INS says. Raises UsageError where none does.
        """
        flops_per_s = self.device.flops_per_s
        if dtype in flops_per_s:
            return self
        stand_ins = ((name, times) for name, times in STAND_INS[dtype] if name in flops_per_s)
        stand_in, slowdown = next(stand_ins, (None, 1.0))
        if stand_in is None:
            raise self._unknown(f"arithmetic in {dtype}")

        # 1. The stand-in's curves under the name of the format.
        curves = dict(self.curves)
        for name, curve in self.curves.items():
            words = name.split()
            if words[0] in RATES and stand_in in words:
                # An elementwise curve is over bytes, which are as slow in any format.
                times = 1.0 if words[0] == "elementwise" else slowdown
                new_name = " ".join(dtype if word == stand_in else word for word in words)
                curves[new_name] = curve.slower(times)

        # 2. Its peak, and the kernels that take it.
        rates = {**flops_per_s, dtype: flops_per_s[stand_in] / slowdown}
        backends = [replace(b, dtype=dtype) for b in self.backends if b.dtype == stand_in]
        return replace(
            self,
            device=replace(self.device, flops_per_s=rates),
            curves=curves,
            backends=(*self.backends, *backends),
        )

    def shared(self, ranks: int) -> "Cluster":
        """The machine with `ranks` on each node.

        CPU ranks share the node's memory and cores. What fewer ranks have measured takes longer
        where all together want more cores than there are.
        """
        if self.device.kind != "cpu" or ranks == self.devices_per_node:
            return self

        # 1. Cores that the ranks want over those that there are.
        growth = ranks / self.devices_per_node
        cores = float(self.facts.get("cores", 0.0))
        threads = float(self.facts.get("threads", 0.0))
        # Cores of the node over those that all threads of the measurement could use.
        spare_factor = cores / (threads * self.devices_per_node) if threads else 1.0
        slowdown = max(growth / max(1.0, spare_factor), min(1.0, growth))

        # 2. The machine as each of them sees it.
        slower = self.moved(dict.fromkeys(("matmul", "attention", "memory"), 1.0 / slowdown))
        device = replace(
            self.device,
            memory_bytes=self.device.memory_bytes / growth,
            cores=self.device.cores and self.device.cores / slowdown,
        )
        return replace(slower, devices_per_node=ranks, device=device)

    def matmul_s(self, m: Number, k: Number, n: Number, dtype: str) -> np.ndarray:
        """Measured seconds of [m, k] @ [k, n]. Raises UsageError where it was not measured."""
        return self._curve(f"matmul {dtype}")(m, k, n)

    def elementwise_s(self, moved_bytes: Number, dtype: str) -> np.ndarray:
        """Measured seconds of an operation that reads and writes so many bytes in all. Raises
        UsageError where it was not measured."""
        return self._curve(f"elementwise {dtype}")(moved_bytes)

    def attention_s(
        self,
        queries: Number,
        keys: Number,
        heads: Heads,
        dtype: str,
        direction: Direction,
        causal: bool = False,
        backend: str | None = None,
        without: str | None = None,
    ) -> np.ndarray:
        """Measured seconds of one attention; a causal one is square. `backend`: the best legal one
        for these sizes if not given, but for `without` where there are others. Heads that were not
        measured take their time from the nearest that were, in proportion to heads and width.
        Raises UsageError where it was not measured."""
        curves = {
            attention: curve
            for attention, curve in self._attentions(dtype, direction, causal).items()
            if backend in (None, attention.backend)
        }

        others = {key: curve for key, curve in curves.items() if key.backend != without}
        curves = others or curves
        if not curves:
            raise self._unknown(f"attention {direction} by {backend or 'any kernel'} in {dtype}")

        def distance(choice: Heads) -> tuple[float, float]:
            """Of the widths first, in logarithms."""
            width_ratio = choice.width / heads.width
            return abs(np.log(width_ratio)), abs(np.log(choice.query / heads.query))

        nearest = min((attention.heads for attention in curves), key=distance)
        scale = heads.query * heads.width / (nearest.query * nearest.width)
        sizes = (queries,) if causal else (queries, keys)
        options = [curve(*sizes) for key, curve in curves.items() if key.heads == nearest]
        return np.asarray(scale * np.minimum.reduce(options))

    def shortest_attention(self, heads: Heads, dtype: str, direction: Direction) -> float:
        """Tokens of the shortest causal attention of these heads that was measured; 1 where none
        was."""
        curves = self._attentions(dtype, direction, causal=True)
        lengths = [curve.axes[0].sizes[0] for key, curve in curves.items() if key.heads == heads]
        return min(lengths, default=1.0)

    def knows_attention(self, dtype: str, backend: str | None = None) -> bool:
        """Whether attention by a legal backend, or by this one, was measured."""
        curves = self._attentions(dtype, "forward", causal=True)
        return any(backend in (None, attention.backend) for attention in curves)

    @cached_property
    def measured_heads(self) -> list[Heads]:
        """Those of which attention was measured."""
        return sorted({attention.heads for attention in self._attention_curves}, key=str)

    def _attentions(
        self, dtype: str, direction: Direction, causal: bool
    ) -> dict[AttentionOf, Curve]:
        """Measured attentions of this kind by backends that ring attention and streaming can
        use."""
        legal = {
            backend.name for backend in self.backends if backend.legal and backend.dtype == dtype
        }
        kind = dtype, direction, "causal" if causal else "full"
        return {
            attention: curve
            for attention, curve in self._attention_curves.items()
            if attention.backend in legal and attention[1:4] == kind
        }

    @cached_property
    def _attention_curves(self) -> dict[AttentionOf, Curve]:
        """Attentions that were measured, and the curve of each."""
        curves = {}
        for name, curve in self.curves.items():
            # As in `attention flash bf16 forward causal 32/8x128`.
            if name.startswith("attention "):
                backend, dtype, direction, shape, heads = name.split()[1:6]
                attention = AttentionOf(backend, dtype, direction, shape, Heads.parse(heads))
                curves[attention] = curve

        return curves

    @cached_property
    def over_nodes(self) -> dict[str, dict[int, Curve]]:
        """By operation, curves of groups with several ranks on each of several nodes, by how many
        on each."""
        curves: dict[str, dict[int, Curve]] = {operation: {} for operation in OPERATIONS}
        for name, curve in self.curves.items():
            if " network by " in name:
                operation, _, _, count = name.split()
                curves[operation][int(count)] = curve
        return curves

    def cores_share(self, level: Level) -> float:
        """Share of a CPU rank's cores that a message takes while it travels at this level, sent and
        received: of the largest one that was measured. 1 where that was not."""
        cores_curve = self.curves.get("cores send")
        send_curve = self.curves.get(f"send {level}")
        if not cores_curve or not send_curve or not self.device.cores:
            return 1.0

        # Cores that are busy while the message travels, over those that there are.
        size_bytes = cores_curve.axes[-1].sizes[-1]
        send_s = send_curve(2, size_bytes)

        return min(1.0, float(cores_curve(size_bytes) / self.device.cores / send_s))

    def copy_s(self, way: str, size_bytes: Number) -> np.ndarray:
        """Seconds of a copy between host and device. `way` is to_device or to_host, with how it is
        done and what runs beside it: `to_device pinned`, `to_host pinned both`. Raises UsageError
        where it was not measured."""
        if self.curves or "device" not in self.links:
            return self._curve(f"copy {way}")(size_bytes)
        link = self.links["device"]
        rate = link.bytes_per_s * self.shares["device link"]
        return link.latency_s + np.asarray(size_bytes, dtype=float) / rate

    def disk_s(self, direction: Literal["read", "write"], size_bytes: Number) -> np.ndarray:
        """Seconds of a block of this size through the page cache, one at a time. Raises UsageError
        where it was not measured."""
        if self.curves or self.disk is None:
            return self._curve(f"disk {direction} plain depth1")(size_bytes)
        rate = self.disk.read_bytes_per_s if direction == "read" else self.disk.write_bytes_per_s
        return np.asarray(size_bytes, dtype=float) / rate

    def _curve(self, name: str) -> Curve:
        if name not in self.curves:
            raise self._unknown(name)
        return self.curves[name]

    def _unknown(self, subject: str) -> UsageError:
        families = sorted({" ".join(name.split()[:3]) for name in self.curves})
        contents = ", ".join(families) or "constants only"
        return UsageError(
            f"nothing is known of {subject} on {self.name} ({contents}); measure it there with:"
            " longshift profile"
        )
