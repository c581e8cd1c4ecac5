"""Home: the training state, once. Master weights, gradient sums and Adam moments of the boxes that this rank keeps. Of weights that are
not trained it keeps the values alone, in the compute format.

Where the boxes lie is `layout.placement`'s: ZeRO-0 keeps whole pieces on every holder, ZeRO-1..3 (arXiv 1910.02054) deal the rows of
each piece over its holders. A bucket's boxes are one flat vector, weights that decay first, in the order of the fused collectives, so
that a gather sends it and a reduction ends in it without rearranging.

    bucket   │ q rows │ k rows │ v rows │ o rows │ ... │ norm │      one master, one gradient, two moments of this shape
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from longshift.dist.world import World
from longshift.layout.box import Box
from longshift.layout.placement import Bucket
from longshift.spec.model import ModelSpec

Source = Callable[[str, Box], Tensor]
NORM_RUN = 1 << 15  # elements
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
BLOCK = (16, 512)  # rows and columns of a weight that are drawn at one time


@dataclass
class Shard:
    """This rank's home of one bucket. `grad` is None between steps where nothing has been reduced, and always where the bucket is frozen.
    Mutable."""

    bucket: Bucket
    boxes: tuple[tuple[str, Box], ...]
    owned: bool
    decaying: int  # elements, from the start, that weight decay applies to
    master: Tensor
    grad: Tensor | None = None

    def views(self, flat: Tensor) -> Iterator[tuple[str, Box, Tensor]]:
        """Every name, box and its view of a vector shaped like `master`."""
        start = 0
        for name, box in self.boxes:
            yield name, box, flat[start : start + box.elements].view(box.shape)
            start += box.elements

    def receive(self, total: Tensor) -> None:
        """Add a reduced gradient; keeps `total` as the sum when it is the first."""
        if self.grad is None:
            self.grad = total
        else:
            self.grad += total


class Home:
    """All shards of one rank. Mutable; it stays where it is for the whole run."""

    def __init__(
        self,
        spec: ModelSpec,
        buckets: tuple[Bucket, ...],
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        source: Source,
        frozen: torch.dtype | None = None,
    ):
        """`frozen`: the format of weights that are not trained; `dtype` where not given."""
        self.spec, self.rank, self.buckets = spec, rank, buckets
        self.shards = [self._shard(b, (frozen or dtype) if b.frozen else dtype, device, source) for b in buckets if rank in b.holders]
        self.learning = [shard for shard in self.shards if not shard.bucket.frozen]
        self._places: dict[str, list[tuple[Shard, Box, int]]] = {}
        for shard in self.shards:
            start = 0
            for name, box in shard.boxes:
                self._places.setdefault(name, []).append((shard, box, start))
                start += box.elements

    def _shard(self, bucket: Bucket, dtype: torch.dtype, device: torch.device, source: Source) -> Shard:
        boxes = bucket.home(self.rank)
        decaying = sum(box.elements for name, box in boxes if self.spec.by_name[name].decay)
        master = torch.empty(sum(box.elements for _, box in boxes), dtype=dtype, device=device)
        shard = Shard(bucket, boxes, bucket.owns(self.rank), decaying, master)
        for name, box, view in shard.views(master):
            view.copy_(source(name, box))
        return shard

    def part(self, name: str, box: Box, what: Literal["master", "grad"]) -> Tensor | None:
        """A view of a box of a master or gradient sum; None where it is not here, or not whole."""
        for shard, held, start in self._places.get(name, ()):
            if box in held:
                flat = shard.master if what == "master" else shard.grad
                return None if flat is None else flat[start : start + held.elements].view(held.shape)[box.within(held)]
        return None

    def squared_norm(self) -> Tensor:
        """This rank's part of the squared global gradient norm, each element counted on one rank only: float64 scalar.

        Squares are summed in the home format over NORM_RUN elements, where float32 loses 1e-7, and in float64 beyond: a float64 copy of
        a whole shard would cost its memory twice over. Infinite where a float32 gradient is above 1e19."""
        grads = [s.grad for s in self.shards if s.owned and s.grad is not None]
        norms = [norm for grad in grads for norm in _norms(grad)] or [torch.zeros(1, device=self.shards[0].master.device)]
        return torch.cat(norms).double().square().sum()

    def not_finite(self, what: Literal["master", "grad"]) -> list[str]:
        """Names of the weights whose master, or gradient, has a value here that is not finite."""
        flats = ((s, s.master if what == "master" else s.grad) for s in self.shards)
        views = ((name, view) for s, flat in flats if flat is not None for name, _, view in s.views(flat))
        return [name for name, view in views if not bool(view.isfinite().all())]

    def scale_gradients(self, factor: float) -> None:
        for shard in self.shards:
            if shard.grad is not None:
                shard.grad.mul_(factor)

    def drop_gradients(self) -> None:
        for shard in self.shards:
            shard.grad = None


def fingerprint(home: Home, world: World) -> int | None:
    """A number that tells other weights that are not trained from these, whatever the layout: the sum of their bits, each weight's times a
    number made from its name. None where all are trained. Collective."""
    if not any(param.frozen for param in home.spec.params):
        return None
    total = torch.zeros((), dtype=torch.int64, device=world.device)
    for shard in home.shards:
        for name, _, view in shard.views(shard.master) if shard.owned and shard.bucket.frozen else ():
            key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
            total += view.view(BITS[view.itemsize]).sum(dtype=torch.int64) * key
    return int(world.everyone.all_reduce(total))


def _norms(x: Tensor) -> tuple[Tensor, Tensor]:
    """Norms of each NORM_RUN elements of a vector, and of what is left."""
    runs = len(x) // NORM_RUN
    rows = x[: runs * NORM_RUN].view(runs, NORM_RUN)
    return torch.linalg.vector_norm(rows, dim=1), torch.linalg.vector_norm(x[runs * NORM_RUN :]).view(1)


def random_source(spec: ModelSpec, seed: int, dtype: torch.dtype) -> Source:
    """Initial weights by box. A value depends on the seed, the weight and its position alone, never on a layout: a weight is a grid of
    blocks, each a stream of its own of the counter-based generator Philox, and a box takes its part of the blocks that it overlaps. Weights
    that end in the residual stream are scaled by 1/sqrt(2 L) as in GPT-2, those of adapters as `spec.adapters` says."""

    def source(name: str, box: Box) -> Tensor:
        param = spec.by_name[name]
        if param.init in ("zeros", "ones"):
            return torch.full(box.shape, float(param.init == "ones"), dtype=dtype)
        key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
        std = (3 * param.shape[1]) ** -0.5 if param.init == "fan_in" else spec.init_std
        std /= (2 * spec.layers) ** 0.5 if param.init == "normal_out" else 1.0
        out = np.empty(box.shape, np.float32)
        for number, block in _blocks(box, param.shape):
            drawn = np.random.Generator(np.random.Philox(key=key, counter=number << 128)).standard_normal(block.shape, np.float32)
            both = block & box
            out[both.within(box)] = drawn[both.within(block)]
        out *= np.float32(std)
        return torch.from_numpy(out).to(dtype)

    return source


def _blocks(box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, Box]]:
    """Blocks of a weight of this shape that a box overlaps, each with its number, row by row."""
    if not box:
        return
    rows, columns = BLOCK if len(shape) > 1 else (BLOCK[0] * BLOCK[1], 1)
    sizes = (rows, columns, *shape[2:])[: len(shape)]
    grid = (range(first // size, -(-last // size)) for first, last, size in zip(box.start, box.stop, sizes))
    per_row = -(-shape[1] // columns) if len(shape) > 1 else 1
    for place in product(*grid):
        start = tuple(at * size for at, size in zip(place, sizes))
        number = place[0] * per_row + sum(place[1:])
        yield number, Box(start, tuple(min(first + size, end) for first, size, end in zip(start, sizes, shape)))
