"""A machine in numbers: nodes, devices, memories, links, and how long operations take on it.

Two kinds of knowledge, each number with its source. *Curves* are measured by `longshift profile`.
*Constants* are a datasheet's, with the share of each that is reached in practice. A question is
answered from a curve where there is one, else from the constants (a roofline);
a preset of published numbers holds no curves.

Levels of links, each one way and per device: `device` to its host's memory, `node` to a device of
the same node, `network` to another node's. bytes of a collective: the whole buffer, that a rank
ends up with (all_gather), starts with (reduce_scatter, all_to_all) or both (all_reduce); the
message of a send.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from longshift.cluster.curves import Curve
from longshift.errors import UsageError
from longshift.spec.formats import FORMATS

Level = Literal["device", "node", "network"]
Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
Number = float | np.ndarray

LEVELS = ("device", "node", "network")
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
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


@dataclass(frozen=True)
class Device:
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
class Link:
    """One way, per device, both ways at once unless a curve says otherwise."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Disk:
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
        query, _, rest = text.partition("/")
        key, _, width = rest.partition("x")
        return cls(int(query), int(key), int(width))


@dataclass(frozen=True)
class Backend:
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
class Calibration:
    """What the steps of a run showed of a cluster. `constants`: what they reach of its figures, as
    in `Cluster.moved`; `band`: relative half-width of a predicted step; `fingerprint`: of the
    figures (`files.figures`); `layouts`: of the run; `errors`: measured over predicted seconds,
    less 1, of each step by what the others showed."""

    constants: Mapping[str, float]
    band: float
    fingerprint: str
    layouts: tuple[str, ...]
    errors: tuple[float, ...]

    @property
    def steps(self) -> int:
        """How many steps there were."""
        return len(self.errors)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Calibration":
        """Of JSON values, as `dataclasses.asdict` makes them."""
        return cls(
            **{**values, "layouts": tuple(values["layouts"]), "errors": tuple(values["errors"])}
        )


class AttentionOf(NamedTuple):
    """Which attention was measured. `kind`: causal or full."""

    backend: str
    dtype: str
    direction: str
    kind: str
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
class Cluster:
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
    links: Mapping[str, Link]
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
        shares = {
            name: share * constants.get(name.split()[0], 1.0) for name, share in self.shares.items()
        }
        curves = {}
        for name, curve in self.curves.items():
            words = name.split()
            rate = constants.get(
                words[1] if words[0] in OPERATIONS else RATES.get(words[0], ""), 1.0
            )
            curves[name] = replace(
                curve, seconds=tuple(seconds / rate for seconds in curve.seconds)
            )
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

        curves = dict(self.curves)
        for name, curve in self.curves.items():
            words = name.split()
            if words[0] in ("matmul", "elementwise", "attention") and stand_in in words:
                # An elementwise curve is over bytes, which are as slow in any format.
                times = 1.0 if words[0] == "elementwise" else slowdown
                new_name = " ".join(dtype if word == stand_in else word for word in words)
                seconds = tuple(times * seconds for seconds in curve.seconds)
                curves[new_name] = replace(curve, seconds=seconds)
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
        growth = ranks / self.devices_per_node
        cores = float(self.facts.get("cores", 0.0))
        threads = float(self.facts.get("threads", 0.0))
        # Cores of the node over those that all threads of the measurement could use.
        spare_factor = cores / (threads * self.devices_per_node) if threads else 1.0
        slowdown = max(growth / max(1.0, spare_factor), min(1.0, growth))

        curves = dict(self.curves)
        for name, curve in self.curves.items():
            if name.split()[0] in RATES:
                seconds = tuple(slowdown * seconds for seconds in curve.seconds)
                curves[name] = replace(curve, seconds=seconds)
        device = replace(
            self.device,
            memory_bytes=self.device.memory_bytes / growth,
            memory_bytes_per_s=self.device.memory_bytes_per_s / slowdown,
            flops_per_s={dtype: rate / slowdown for dtype, rate in self.device.flops_per_s.items()},
            cores=self.device.cores and self.device.cores / slowdown,
        )
        return replace(self, devices_per_node=ranks, device=device, curves=curves)

    def matmul_s(
        self, m: Number, k: Number, n: Number, dtype: str, beyond: bool = False
    ) -> np.ndarray:
        """Seconds of [m, k] @ [k, n]."""
        curve = self.curves.get(f"matmul {dtype}")
        if curve:
            return curve(m, k, n, beyond=beyond)
        m, k, n = (np.asarray(size, dtype=float) for size in (m, k, n))
        moved_bytes = FORMATS[dtype].compute_bytes * (m * k + k * n + m * n)
        return self._roofline(2 * m * k * n, moved_bytes, dtype, "matmul")

    def attention_s(
        self,
        queries: Number,
        keys: Number,
        heads: Heads,
        dtype: str,
        direction: Literal["forward", "backward"] = "forward",
        causal: bool = False,
        backend: str | None = None,
        beyond: bool = False,
        without: str | None = None,
    ) -> np.ndarray:
        """Seconds of one attention; causal ones are square. `backend`: the best legal one for these
        sizes if not given, but for `without` where there are others. Heads that were not measured
        (allowed by `beyond`) take their time from the nearest that were, in proportion to heads and
        width. Raises UsageError where it was not measured."""
        if causal and np.any(np.asarray(queries) != np.asarray(keys)):
            raise UsageError(
                "a causal attention is square; cut a longer one into a diagonal and full pairs"
            )
        curves = self._attentions(dtype, direction, causal, backend, without)
        if not curves and backend is None:
            queries = np.asarray(queries, dtype=float)
            keys = np.asarray(keys, dtype=float)
            flops = attention_flops(queries, keys, heads, direction, causal)
            tensors = 2 if direction == "forward" else 4  # q and out; and their gradients
            rows = heads.query * queries + heads.key * keys
            moved_bytes = FORMATS[dtype].compute_bytes * tensors * heads.width * rows
            return self._roofline(flops, moved_bytes, dtype, f"attention {direction}")
        choices = {curve_heads for _, curve_heads in curves}
        if not choices:
            raise self._unknown(f"attention {direction} by {backend} in {dtype}")
        if heads not in choices and not beyond:
            raise UsageError(
                f"attention with heads {heads} was not measured, only"
                f" {', '.join(map(str, choices))}; beyond=True guesses"
            )

        def distance(choice: Heads) -> tuple[float, float]:
            """Of the widths first, in logarithms."""
            width_ratio = choice.width / heads.width
            return abs(np.log(width_ratio)), abs(np.log(choice.query / heads.query))

        nearest = min(choices, key=distance)
        scale = heads.query * heads.width / (nearest.query * nearest.width)
        options = []
        for (_, curve_heads), curve in curves.items():
            if curve_heads == nearest:
                seconds = (
                    curve(queries, beyond=beyond) if causal else curve(queries, keys, beyond=beyond)
                )
                options.append(seconds)
        return np.asarray(scale * np.minimum.reduce(options))

    def shortest_attention(
        self, heads: Heads, dtype: str, direction: Literal["forward", "backward"]
    ) -> float:
        """Tokens of the shortest causal attention of these heads that was measured; 1 where none
        was."""
        curves = self._attentions(dtype, direction, True)
        lengths = [curve.axes[0].sizes[0] for key, curve in curves.items() if key[1] == heads]
        return min(lengths, default=1.0)

    def best_backend(
        self,
        queries: float,
        keys: float,
        heads: Heads,
        dtype: str,
        direction: Literal["forward", "backward"] = "forward",
        causal=False,
    ) -> str:
        """The fastest backend for this shape that ring attention and streaming can use. Raises
        UsageError where none was measured."""
        curves = self._attentions(dtype, direction, causal)
        names = {name for name, curve_heads in curves if curve_heads == heads}
        if not names:
            raise self._unknown(f"attention {direction} with heads {heads} in {dtype}")

        def seconds(name: str) -> float:
            return float(
                self.attention_s(
                    queries, keys, heads, dtype, direction, causal, backend=name, beyond=True
                )
            )

        return min(sorted(names), key=seconds)

    def elementwise_s(self, moved_bytes: Number, dtype: str, beyond: bool = False) -> np.ndarray:
        """Seconds of an operation that reads and writes so many bytes in all."""
        curve = self.curves.get(f"elementwise {dtype}")
        return (
            curve(moved_bytes, beyond=beyond)
            if curve
            else self._roofline(0.0, moved_bytes, dtype, "matmul")
        )

    def over_nodes(self, operation: Operation) -> list[tuple[int, Curve]]:
        """Curves of groups with several ranks on each of several nodes, and how many on each."""
        return [(count, curve) for name, count, curve in self._over_nodes if name == operation]

    @cached_property
    def _over_nodes(self) -> list[tuple[str, int, Curve]]:
        curves = []
        for name, curve in self.curves.items():
            if " network by " in name:
                operation, _, _, count = name.split()
                curves.append((operation, int(count), curve))
        return curves

    def cores_share(self, level: Level) -> float:
        """Share of a CPU rank's cores that a message takes while it travels at this level, sent and
        received: of the largest one that was measured. 1 where that was not."""
        if (
            "cores send" not in self.curves
            or f"send {level}" not in self.curves
            or not self.device.cores
        ):
            return 1.0
        curve = self.curves["cores send"]
        size_bytes = curve.axes[-1].sizes[-1]
        send_s = self.curves[f"send {level}"](2, size_bytes, beyond=True)
        return min(1.0, float(curve(size_bytes) / self.device.cores / send_s))

    def copy_s(self, way: str, size_bytes: Number, beyond: bool = False) -> np.ndarray:
        """Seconds of a copy between host and device. `way` is to_device or to_host, with how it is
        done and what runs beside it where that was measured: `to_device pinned`, `to_host pinned
        both`. Raises UsageError where it was not measured."""
        curve = self.curves.get(f"copy {way}")
        if curve:
            return curve(size_bytes, beyond=beyond)
        if self.curves or way.split()[0] not in ("to_device", "to_host"):
            raise self._unknown(f"copy {way}")
        link, share = self._link("device")
        return link.latency_s + np.asarray(size_bytes, dtype=float) / (link.bytes_per_s * share)

    def disk_s(
        self,
        direction: Literal["read", "write"],
        size_bytes: Number,
        depth: int,
        mode: str = "direct",
        beyond=False,
    ) -> np.ndarray:
        """Seconds a block of this size, with `depth` of them under way at a time; mode plain
        (through the page cache) or direct. Raises UsageError where it was not measured."""
        curve = self.curves.get(f"disk {direction} {mode} depth{depth}")
        if curve:
            return curve(size_bytes, beyond=beyond)
        if self.disk is None or self.curves:
            raise self._unknown(f"disk {direction} {mode} at depth {depth}")
        rate = self.disk.read_bytes_per_s if direction == "read" else self.disk.write_bytes_per_s
        return np.asarray(size_bytes, dtype=float) / rate

    def _attentions(
        self,
        dtype: str,
        direction: str,
        causal: bool,
        backend: str | None = None,
        without: str | None = None,
    ) -> dict[tuple[str, Heads], Curve]:
        """Measured attentions of this kind, by (backend, heads): of the named backend, or of all
        legal ones but `without`, and of that one where there is no other."""
        usable = self.legal(dtype) if backend is None else {backend}
        kind = dtype, direction, "causal" if causal else "full"
        curves = {}
        for attention, curve in self._attention_curves:
            if attention.backend in usable and attention[1:4] == kind:
                curves[attention.backend, attention.heads] = curve
        return {key: curve for key, curve in curves.items() if key[0] != without} or curves

    def legal(self, dtype: str) -> set[str]:
        """Backends that ring attention and streaming can use."""
        return {
            backend.name for backend in self.backends if backend.dtype == dtype and backend.legal
        }

    def knows(self, backend: str, dtype: str) -> bool:
        """Whether attention by a legal backend was measured."""
        keys = [(attention.backend, attention.dtype) for attention, _ in self._attention_curves]
        return backend in self.legal(dtype) and (backend, dtype) in keys

    @cached_property
    def _attention_curves(self) -> list[tuple[AttentionOf, Curve]]:
        """Attentions that were measured, and the curve of each."""
        curves = []
        for name, curve in self.curves.items():
            if name.startswith("attention "):
                backend, dtype, direction, kind, heads = name.split()[1:6]
                attention = AttentionOf(backend, dtype, direction, kind, Heads.parse(heads))
                curves.append((attention, curve))
        return curves

    @cached_property
    def measured_heads(self) -> list[Heads]:
        """Those of which attention was measured."""
        return sorted({attention.heads for attention, _ in self._attention_curves}, key=str)

    def _roofline(self, flops: Number, moved_bytes: Number, dtype: str, share: str) -> np.ndarray:
        if dtype not in self.device.flops_per_s:
            raise self._unknown(f"arithmetic in {dtype}")
        compute_s = np.asarray(flops) / (self.device.flops_per_s[dtype] * self.shares[share])
        memory_s = np.asarray(moved_bytes) / (
            self.device.memory_bytes_per_s * self.shares["memory"]
        )
        return self.device.launch_s + np.maximum(compute_s, memory_s)

    def _link(self, level: str) -> tuple[Link, float]:
        """The link, and the share of its bandwidth that is reached."""
        if level not in self.links:
            raise self._unknown(f"links of level {level}")
        return self.links[level], self.shares[f"{level} link"]

    def _unknown(self, subject: str) -> UsageError:
        families = sorted({" ".join(name.split()[:3]) for name in self.curves})
        contents = ", ".join(families) or "constants only"
        return UsageError(
            f"nothing is known of {subject} on {self.name} ({contents}); measure it there with:"
            " longshift profile"
        )


def attention_flops(
    queries: Number, keys: Number, heads: Heads, direction: str, causal: bool
) -> Number:
    """Floating-point operations of one attention: 2 matmuls forward, 5 backward (the scores are
    computed again); half when causal."""
    matmuls = 2 if direction == "forward" else 5
    return (
        2
        * matmuls
        * heads.query
        * heads.width
        * np.asarray(queries, dtype=float)
        * keys
        * (0.5 if causal else 1.0)
    )
