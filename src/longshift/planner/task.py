"""What is planned: a model's documents on a cluster, and what a person has decided already."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from longshift.cluster.cluster import Cluster
from longshift.layout.home_tiers import HomeTiers
from longshift.layout.layout import number_fields
from longshift.planner.memory_bound import Training
from longshift.simulate.cost import Cost
from longshift.simulate.habits import habits
from longshift.simulate.rates import rates
from longshift.spec.formats import Format, MomentFormat, Wire, formats_of
from longshift.spec.model import ModelSpec
from longshift.switch.links import links_of
from longshift.weigh.needs import StepShape
from longshift.weigh.recorder import Transport, transport_on
from longshift.workload.groups import Edge
from longshift.workload.length_file import Lengths

# Assumed, not measured: bytes of the driver's context and of NCCL's buffers; the share of memory in
# which an allocator leaves no holes.
CONTEXT_BYTES = float(1 << 30)
FILLED = 0.94

Edges = tuple[Edge, ...]  # a plan: the length groups of a step, from short to long


@dataclass(frozen=True)
class PlanTask:
    """What is planned.

    lengths          of the corpus, cut as the run cuts them
    tokens_per_step  at least so many
    world            number of ranks
    fixed            by word of a layout, the numbers that it may have
    memory_bytes     of a device; the cluster's if None
    moments, packed  how many the optimizer keeps, and their format between updates
    wire             formats on the wire
    compile          as `train.compile`
    max_len          tokens that a group must have room for, though no document is so long
    home             memories of the training state
    homes            those that are compared; none if `home` is given
    """

    spec: ModelSpec
    cluster: Cluster
    lengths: Lengths
    tokens_per_step: int
    precision: str
    world: int
    fixed: Mapping[str, Sequence[int | str]] = field(default_factory=dict)
    memory_bytes: float | None = None
    moments: int = 2
    packed: MomentFormat = "float32"
    wire: Wire = Wire()  # noqa: RUF009  (frozen)
    compile: bool = False
    max_len: int = 0
    home: HomeTiers = HomeTiers()  # noqa: RUF009  (frozen)
    homes: tuple[HomeTiers, ...] = ()

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document."""
        return int(self.lengths.lengths[-1])

    @property
    def longest(self) -> int:
        """Tokens of the longest document that the last group has room for."""
        return max(self.longest_document, self.max_len)

    @property
    def fixed_fields(self) -> dict[str, Sequence[int | str]]:
        """What is fixed, by field of a layout."""
        fields = number_fields()
        return {fields.get(word, word): values for word, values in self.fixed.items()}

    @property
    def formats(self) -> Format:
        return formats_of(self.precision, self.moments, self.packed, self.wire)

    @property
    def on_gpu(self) -> bool:
        return self.cluster.device.kind == "cuda"

    @property
    def transport(self) -> Transport:
        return transport_on(self.on_gpu)

    @property
    def cost(self) -> Cost:
        """Work of turns on the cluster's devices."""
        run_habits = habits(
            compile=self.compile,
            precision=self.precision,
            device=self.cluster.device,
            wire=self.wire,
            moments=self.moments,
        )
        return Cost(self.spec, rates(self.cluster, self.precision), run_habits)

    @property
    def budget_bytes(self) -> float:
        """Bytes of tensors that may lie on a device."""
        total_bytes = self.memory_bytes
        if total_bytes is None:
            total_bytes = self.cluster.device.memory_bytes
        return total_bytes * FILLED - (CONTEXT_BYTES if self.on_gpu else 0)

    @property
    def limits(self) -> dict[str, float]:
        """Bytes that a rank may have, by place. A disk that is not known has no room."""
        cluster = self.cluster
        ranks_per_node = cluster.devices_per_node
        # A CPU's host is its device, whose limit counts.
        host_bytes = FILLED * cluster.host_bytes / ranks_per_node if self.on_gpu else np.inf
        disk_bytes = cluster.disk.bytes / ranks_per_node if cluster.disk else 0.0
        return {"device": self.budget_bytes, "host": host_bytes, "disk": disk_bytes}

    @property
    def places(self) -> tuple[str, ...]:
        """The device, and the other places where home lies."""
        on_device = ("device",) if self.on_gpu else ("device", "host")
        return ("device", *(tier for tier in self.home.tiers if tier not in on_device))

    @property
    def training(self) -> Training:
        """What is trained, as bounds of memory take it."""
        return Training(self.spec, self.formats, self.transport, self.home.outside(not self.on_gpu))

    def step_shape(self, edges: Edges, early: bool = True) -> StepShape:
        """The shape of a run's steps with these groups.

        `early`: whether units on disk may be updated before the norm.
        """
        return StepShape.of(
            self.spec,
            edges,
            links_of(self.cluster, self.cluster.devices_per_node, self.cluster.nodes),
            self.formats,
            self.tokens_per_step,
            self.longest,
            home_in=self.home,
            early=early,
        )
