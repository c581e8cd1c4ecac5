"""What `longshift plan` computes: the best layouts for documents on a cluster, as values."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from longshift.layout.layout import format_size
from longshift.print_result import CommandResult


class PlannedGroup(CommandResult):
    """The documents of up to `upto` tokens in a mean step: how many, their tokens, the layout and
    packs that compute them, in seconds."""

    upto: int
    layout: str
    pack: int
    documents: float
    tokens: float
    seconds: float
    tokens_per_s: float


class PlannedWay(CommandResult):
    """A way to compute: `layout` as a config's `layout` has it. `seconds` of a mean step, between
    `least_s` and `most_s`; `bytes` by place, of the rank that needs most, at `peak`. Of a rival,
    `times` as long as the best; of the best, its `groups` and the seconds by lane."""

    OPTIONAL = ("groups", "lanes", "times")

    layout: Any
    seconds: float
    least_s: float
    most_s: float
    bytes: Mapping[str, int]
    peak: str
    groups: tuple[PlannedGroup, ...] | None = None
    lanes: Mapping[str, float] | None = None
    times: float | None = None


class PlannedCluster(CommandResult):
    name: str
    nodes: int
    devices_per_node: int

    def __str__(self) -> str:
        return f"{self.nodes} x {self.devices_per_node} {self.name}"


class Short(CommandResult):
    """A way for which `bytes` are lacking at a `place`: the device, or a rank's part of the host's
    memory or of the disk."""

    way: Any
    bytes: int
    place: str


class PlannedHome(CommandResult):
    """Where the training state may lie, and the seconds of a step then; None where nothing fits."""

    home: Any
    seconds: float | None


class LayoutPlan(CommandResult):
    """The best layouts for documents on a cluster. `home`: where the training state lies, of the
    `homes` that were compared. `fits`: whether there is a layout; where there is none, `changes`
    after which there would be, and which ways are `short` of memory. `best`, the best `single`
    layout, the best with `context_parallel` alone, and `rivals`; `tried`: those that `layout: auto`
    trains some steps each, in their order. `candidates` were compared, and `refused` by reason.
    `mfu` by convention. `notes`: the choice in sentences."""

    OPTIONAL = ("best", "mfu")

    cluster: PlannedCluster
    ranks: int
    home: Any
    homes: tuple[PlannedHome, ...]
    tokens_per_step: int
    documents: int
    longest: int
    candidates: int
    refused: Mapping[str, int]
    budget_bytes: int
    fits: bool
    changes: tuple[str, ...]
    short: tuple[Short, ...]
    best: PlannedWay | None = None
    mfu: Mapping[str, float] | None = None
    single: PlannedWay | None = None
    context_parallel: PlannedWay | None = None
    tried: tuple[PlannedWay, ...] = ()
    rivals: tuple[PlannedWay, ...] = ()
    notes: tuple[str, ...] = ()

    def parts(self) -> Iterator[RenderableType]:
        """What was asked, a row for each group of the best way, and the notes."""
        yield (
            f"{self.documents:,} documents of up to {format_size(self.longest)} tokens on"
            f" {self.cluster}"
        )
        if self.best is not None:
            table = Table(
                "up to", "layout", "pack", "documents", "tokens", "seconds", "tokens/s", box=None
            )
            for group in self.best.groups or ():
                table.add_row(
                    format_size(group.upto),
                    group.layout,
                    format_size(group.pack),
                    f"{group.documents:.1f}",
                    f"{group.tokens:,.0f}",
                    f"{group.seconds:.3g}",
                    f"{group.tokens_per_s:,.0f}",
                )
            yield table
        yield from self.notes
