"""Home: the training state, once. Master weights, gradient sums and the optimizer's moments of the
boxes that this rank keeps. Of weights that are not trained it keeps the values alone, in the
compute format.

Where the boxes lie is `layout.placement`'s: ZeRO-0 keeps whole pieces on every holder, ZeRO-1..3
(arXiv 1910.02054) deal the rows of each piece over its holders. A bucket's boxes are one flat
vector, weights that decay first, in the order of the fused collectives, so that a gather sends it
and a reduction ends in it without rearranging.

    bucket   │ q rows │ k rows │ v rows │ o rows │ ... │ norm │
             one master, one gradient, each moment of this shape

Moments may be packed into fewer bits between updates (`state.moments`).

Home is in the device's memory, in the host's (ZeRO-Offload, arXiv 2101.06840), on disk
(`state.records`), or some units are here and some there (`layout.home_tiers`). Wherever a unit
lies, it is updated there: of what is on disk, that is host memory.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from longshift.dist.world import World
from longshift.layout.blocks import CutBlocks, cut_blocks
from longshift.layout.box import Box
from longshift.layout.home_tiers import (
    HomeTiers,
    StateBytes,
    early_units,
    tiers_of,
    trained_elements,
)
from longshift.layout.layout import Layout
from longshift.layout.placement import Bucket, buckets_of
from longshift.spec.formats import MomentFormat
from longshift.spec.model import ModelSpec
from longshift.spec.rule import Rule
from longshift.state.crossing import Crossing, crossing_of, slots_in
from longshift.state.moments import ROOTS, SCALE, PackedMoment, saved_moments
from longshift.state.precision import Precision
from longshift.state.records import (
    DiskVector,
    PlacedBox,
    Records,
    Vector,
    in_memory,
    place_boxes,
)

Source = Callable[[str, Box], Tensor]  # the values of a box of a weight
NORM_RUN = 1 << 15  # elements


@dataclass
class Shard:
    """This rank's home of one bucket. `vectors`: "master", each moment, or its codes and scales,
    and where the unit is on disk "grad". `grad` is None between steps where nothing has been
    reduced, and always where the bucket is frozen. Mutable."""

    bucket: Bucket
    boxes: tuple[PlacedBox, ...]
    owned: bool
    decaying: int  # elements, from the start, that weight decay applies to
    vectors: Mapping[str, Vector]  # by kind
    grad: Tensor | None = None
    norms: tuple[Tensor, ...] = ()  # of a gradient sum on disk
    # Moments by name, where they are packed.
    packed: Mapping[str, PackedMoment] = field(default_factory=dict)
    crossing: Crossing | None = None  # between a GPU and what lies outside it
    pinned: Tensor | None = None  # where a gradient sum goes, of a home in a GPU's host memory

    @property
    def master(self) -> Tensor:
        return self.vectors["master"].flat

    @property
    def on_disk(self) -> bool:
        return isinstance(self.vectors["master"], DiskVector)

    def moment(self, name: str) -> Tensor:
        """A moment as updates see it."""
        return self.packed[name].wide if self.packed else self.vectors[name].flat

    def views(self, flat: Tensor) -> Iterator[tuple[str, Box, Tensor]]:
        """Every name, box and its view of a vector shaped like `master`."""
        for placed in self.boxes:
            yield placed.name, placed.box, placed.values(flat)

    def receive(self, total: Tensor) -> None:
        """Add a reduced gradient. Where it is the first, the sum is `total` itself; on disk, and in
        another memory, a copy of it, which is there when home is `settled`."""
        if self.crossing is not None:
            add = self.grad is not None
            self.crossing.take(total, self.begin() if self.grad is None else self.grad, add)
        elif self.grad is not None:
            self.grad += total
        elif self.on_disk:
            # The file is written from the vector's own memory.
            self.begin().copy_(total)
        else:
            self.grad = total

    def take_second_places(self) -> None:
        """Let the master and moments be what was written to second places of the file."""
        for vector in self.vectors.values():
            if isinstance(vector, DiskVector) and vector.second is not None:
                # The next early update goes where this state lay.
                vector.start, vector.second = vector.second, vector.start

    def begin(self) -> Tensor:
        """The gradient sum, with undefined contents."""
        assert self.grad is None
        if self.on_disk:
            self.vectors["grad"].hold()
            self.grad = self.vectors["grad"].flat
        else:
            self.grad = torch.empty_like(self.master) if self.pinned is None else self.pinned
        return self.grad


class Home:
    """All shards of one rank. Mutable; it stays where it is for the whole run."""

    def __init__(
        self,
        spec: ModelSpec,
        cut: Layout,
        world: World,
        precision: Precision,
        source: Source,
        home_in: HomeTiers = HomeTiers(),  # noqa: B008  (frozen)
        folder: str | Path | None = None,
        rule: Rule | None = None,
        packed: MomentFormat = "float32",
        early: bool = True,
    ):
        """The home of this rank of a world, cut as `cut` is. `home_in`: where which units lie, on
        disk below `folder`. `rule`: of its updates, None where there are none; its moments are
        `packed` into this format between them. `early`: whether units on disk may be updated before
        the norm, unless gradients are scaled. Collective where moments are packed into float8."""
        self.spec = spec
        self.rank = world.rank
        self.home_in = home_in
        self.moments = rule.moments if rule else ()
        self.packed: MomentFormat = packed if self.moments else "float32"
        self.saved = saved_moments(self.moments, self.packed, precision.home)
        self.records = None
        if "disk" in home_in.tiers:
            self.records = Records(Path(folder or tempfile.gettempdir()))
        self._wide: dict[int, int] = {}  # units whose moments are unpacked, for which update

        buckets = buckets_of(spec, cut, self.rank)
        state_bytes = StateBytes(
            precision.compute.itemsize, precision.home.itemsize, len(self.moments), self.packed
        )
        self.tiers = tiers_of(home_in, buckets, self.rank, state_bytes)
        slots = slots_in(self.tiers, buckets, self.rank, precision.compute.itemsize)
        self.crossing = crossing_of(world.device, slots) if slots else None
        self.shards = [self._shard(bucket, precision, world.device, source) for bucket in buckets]
        self.learning = [shard for shard in self.shards if not shard.bucket.frozen]
        self._places: dict[str, list[tuple[Shard, PlacedBox]]] = {}
        for shard in self.shards:
            for placed in shard.boxes:
                self._places.setdefault(placed.name, []).append((shard, placed))

        self.doubled = self.no_room = False
        if self.records and self.packed == "float32" and early and not precision.scaled:
            units = early_units(self.tiers, trained_elements(spec, buckets, self.rank))
            self._double(self.records, units, world)

        self.cut: Mapping[int, CutBlocks] = {}
        if self.packed == "float8":
            self.cut = cut_blocks(spec, cut)
            world.prepare(sorted({blocks.ranks for blocks in self.cut.values()}), "scales")

    def _double(self, records: Records, units: Iterable[int], world: World) -> None:
        """Make second records of what lies on disk of these units, where the disk has room."""
        vectors = [
            shard.vectors[kind]
            for unit in units
            for shard in self._learning(unit)
            for kind in ("master", *self.saved)
        ]
        on_disk = [vector for vector in vectors if isinstance(vector, DiskVector)]
        self.doubled = records.double(on_disk, world.per_node)
        self.no_room = bool(on_disk) and not self.doubled

    @property
    def by_unit(self) -> bool:
        """Whether it is updated unit by unit."""
        return self.home_in.updates_late or self.packed != "float32"

    def settled(self) -> None:
        """Return when gradient sums are where they lie."""
        if self.crossing is not None:
            self.crossing.settled()

    def close(self) -> None:
        """Give the file back, where there is one."""
        if self.records:
            self.records.close()

    def _shard(
        self, bucket: Bucket, precision: Precision, device: torch.device, source: Source
    ) -> Shard:
        boxes = place_boxes(bucket.home(self.rank))
        tier = self.tiers[bucket.unit]

        # 1. Make its vectors.
        elements = sum(placed.box.elements for placed in boxes)
        formats = {"master": (elements, precision.compute if bucket.frozen else precision.home)}
        if not bucket.frozen:
            blocks = sum(placed.blocks.elements for placed in boxes)
            formats |= {
                kind: (blocks if kind.endswith(SCALE) else elements, dtype)
                for kind, dtype in self.saved.items()
            }
            if tier == "disk":
                formats["grad"] = formats["master"]
        vectors: dict[str, Vector] = {}
        for kind, (size, dtype) in formats.items():
            if self.records is not None and tier == "disk":
                vectors[kind] = self.records.vector(size, dtype)
            else:
                vectors[kind] = Vector(
                    torch.zeros(size, dtype=dtype, device=device if tier == "device" else "cpu")
                )
        decaying = sum(p.box.elements for p in boxes if self.spec.by_name[p.name].decay)
        shard = Shard(bucket, boxes, bucket.owns(self.rank), decaying, vectors)

        # 2. Fill the master, with all of it in memory.
        for vector in vectors.values():
            vector.hold()
        if self.packed != "float32" and not bucket.frozen:
            shard.packed = {name: self._packed(shard, name) for name in self.moments}
        if self.crossing is not None and tier != "device":
            shard.crossing = self.crossing
            if tier == "host" and not bucket.frozen:
                shard.pinned = self.crossing.pinned(shard.master)
        fill(shard, source)
        vectors["master"].write()
        vectors["master"].ready()
        for vector in vectors.values():
            vector.evict()
        return shard

    def _packed(self, shard: Shard, name: str) -> PackedMoment:
        scales = shard.vectors.get(name + SCALE)
        moment = PackedMoment(
            boxes=shard.boxes,
            format=self.packed,
            root=name in ROOTS and self.packed == "float8",
            wide=torch.empty_like(shard.master),
            codes=shard.vectors[name].flat,
            scales=scales.flat if scales else None,
        )
        # Between updates the codes alone have memory.
        moment.memory.drop()
        return moment

    def flat(self, shard: Shard, kind: str) -> Tensor:
        """The values of a shard's vector of this kind; on disk, a copy of them."""
        if kind == "grad" and not shard.on_disk:
            return shard.grad  # pyright: ignore[reportReturnType]
        with in_memory([shard.vectors[kind]]):
            flat = shard.vectors[kind].flat
            return flat.clone() if shard.on_disk else flat

    # What operations of the program do with units on disk

    def read(self, unit: int, part: str) -> None:
        """Start to bring the masters of a unit, its gradient sums as far as there are some, its
        masters and moments, or all of it."""
        for vector in self._vectors(unit, part):
            vector.read()

    def ready(self, unit: int, part: str) -> None:
        """Return when what was read is in memory."""
        for vector in self._vectors(unit, part):
            vector.ready()

    def evict(self, unit: int, part: str) -> None:
        """Give back the memory of what was read and has not changed."""
        for vector in self._vectors(unit, part):
            vector.evict()

    def write(self, unit: int, part: str) -> None:
        """Start to write the gradient sums of a unit, whose norms are remembered; its masters and
        moments, to second places; or all of it, whose gradient sums are done with."""
        if part == "sums":
            self.settled()
        for shard in self._learning(unit):
            if part == "sums":
                assert shard.grad is not None
                # The global norm is asked for when the sum is out of memory.
                shard.norms = _norms(shard.grad)
            elif part == "record":
                shard.vectors["grad"].evict()
        for vector in self._written(unit, part):
            vector.write(second=part == "state")

    def written(self, unit: int, part: str) -> None:
        """Return when that is on disk; its memory is given back."""
        for vector in self._written(unit, part):
            vector.written()

    # What operations do with packed moments

    def unpack(self, unit: int, number: int) -> None:
        """Have the moments of a unit in the home format, for the update of this number."""
        self._wide[unit] = number
        for moment in self._moments(unit):
            moment.unpack()

    def pack(self, unit: int, world: World) -> None:
        """Keep the codes of a unit's moments alone, if they were unpacked. Collective where home
        cuts blocks of the unit: see `layout.blocks`."""
        number = self._wide.pop(unit, None)
        if number is None:
            return
        # One collective shares the maxima of all moments, so all are measured first.
        for moment in self._moments(unit):
            moment.measure()
        if unit in self.cut:
            self._share_maxima(unit, world)
        for moment in self._moments(unit):
            moment.pack(number)

    def _share_maxima(self, unit: int, world: World) -> None:
        """Make the maxima of a unit's blocks those of whole blocks. Collective."""
        blocks = self.cut[unit]
        device = self.shards[0].master.device
        shared = torch.zeros(len(self.moments), blocks.count, device=device)
        pairs = []
        for shard in self._learning(unit):
            for row, name in zip(shared, self.moments):
                pairs += self._cut_maxima(shard, name, blocks, row)

        # 1. Enter this rank's maxima; all ranks keep the largest.
        for part, total in pairs:
            total.copy_(torch.maximum(part, total))
        group = world.group(blocks.ranks, "scales")
        shared.copy_(group.all_reduce(shared.to(world.device), dist.ReduceOp.MAX))

        # 2. Take the result back into the shards.
        for part, total in pairs:
            part.copy_(total)

    def _cut_maxima(
        self, shard: Shard, name: str, blocks: CutBlocks, shared: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The maxima of blocks that home cuts, as far as a shard has a part of them, and their
        places among those of all ranks."""
        maxima = shard.vectors[name + SCALE].flat
        for placed in shard.boxes:
            local = placed.blocks
            if not local or placed.name not in blocks.places:
                continue
            # Of a weight the shared maxima are its rows by the columns of blocks that are cut.
            first, columns = blocks.places[placed.name]
            shape = (*self.spec.by_name[placed.name].shape[:-1], len(columns))
            grid = shared[first:][: prod(shape)].view(shape)
            rows = tuple(map(slice, local.start[:-1], local.stop[:-1]))
            for index, column in enumerate(columns):
                if local.start[-1] <= column < local.stop[-1]:
                    part = placed.scales(maxima)[..., column - local.start[-1]]
                    yield part, grid[..., index][rows]

    def _moments(self, unit: int) -> list[PackedMoment]:
        return [moment for shard in self._learning(unit) for moment in shard.packed.values()]

    def _learning(self, unit: int) -> list[Shard]:
        return [shard for shard in self.learning if shard.bucket.unit == unit]

    def _vectors(self, unit: int, part: str) -> list[Vector]:
        if part == "master":
            return [shard.vectors["master"] for shard in self.shards if shard.bucket.unit == unit]
        shards = self._learning(unit)
        if part == "sums":
            return [shard.vectors["grad"] for shard in shards if shard.grad is not None]
        kinds = ["master", *self.saved]
        if part == "record":
            kinds.append("grad")
        return [shard.vectors[kind] for shard in shards for kind in kinds]

    def _written(self, unit: int, part: str) -> list[Vector]:
        return self._vectors(unit, "state" if part == "record" else part)

    # All of it

    def part(self, name: str, box: Box, what: Literal["master", "grad"]) -> Tensor | None:
        """A view of a box of a master or gradient sum; None where it is not here, or not whole."""
        for shard, placed in self._places.get(name, ()):
            if box in placed.box:
                flat = shard.master if what == "master" else shard.grad
                return None if flat is None else placed.values(flat)[box.within(placed.box)]
        return None

    def squared_norm(self) -> Tensor:
        """This rank's part of the squared global gradient norm, each element counted on one rank
        only: float64 scalar.

        Squares are summed in the home format over NORM_RUN elements, where float32 loses 1e-7, and
        in float64 beyond: a float64 copy of a whole shard would cost its memory twice over.
        Infinite where a float32 gradient is above 1e19."""
        self.settled()
        norms: list[Tensor] = []
        for shard in self.shards:
            if shard.owned and shard.grad is not None:
                norms += shard.norms if shard.on_disk else _norms(shard.grad)
        device = self.shards[0].master.device
        # A rank that owns nothing adds zero: the sum over ranks is a collective.
        joined = torch.cat([norm.to(device) for norm in norms] or [torch.zeros(1, device=device)])
        return joined.double().square().sum()

    def not_finite(self, what: Literal["master", "grad"]) -> list[str]:
        """Names of the weights whose master, or gradient, has a value here that is not finite."""
        names = []
        for shard in self.shards:
            if what == "master" or shard.grad is not None:
                views = shard.views(self.flat(shard, what))
                names += [name for name, _, view in views if not view.isfinite().all()]
        return names

    def drop_gradients(self) -> None:
        for shard in self.shards:
            shard.grad = None


def fill(shard: Shard, source: Source) -> None:
    """Write the values of a source into a shard's master."""
    for name, box, view in shard.views(shard.master):
        view.copy_(source(name, box))


def _norms(x: Tensor) -> tuple[Tensor, Tensor]:
    """Norms of each NORM_RUN elements of a vector, and of what is left."""
    runs = len(x) // NORM_RUN
    rows = x[: runs * NORM_RUN].view(runs, NORM_RUN)
    rest = x[runs * NORM_RUN :]
    return torch.linalg.vector_norm(rows, dim=1), torch.linalg.vector_norm(rest).view(1)
