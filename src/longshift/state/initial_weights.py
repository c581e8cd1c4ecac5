"""Weights that a run begins with: drawn ones, and which ones those are that are not trained."""

import hashlib
from collections.abc import Iterator
from itertools import product

import numpy as np
import torch
from torch import Tensor

from longshift.dist.world import World
from longshift.layout.box import Box
from longshift.spec.model import ModelSpec
from longshift.state.home import Home, Source

BLOCK = (16, 512)  # rows and columns of a weight that are drawn at one time
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_source(spec: ModelSpec, seed: int, dtype: torch.dtype) -> Source:
    """Initial weights by box. A value depends on the seed, the weight and its position alone, never
    on a layout: a weight is a grid of blocks, each a stream of its own of the counter-based
    generator Philox, and a box takes its part of the blocks that it overlaps. Weights that end in
    the residual stream are scaled by 1/sqrt(2 L) as in GPT-2,
    those of adapters as `spec.adapters` says."""

    def source(name: str, box: Box) -> Tensor:
        param = spec.by_name[name]
        if param.init in ("zeros", "ones"):
            return torch.full(box.shape, float(param.init == "ones"), dtype=dtype)
        key = _hash_number(f"{seed}/{name}", 16)
        std = spec.init_std
        if param.init == "fan_in":
            std = (3 * param.shape[1]) ** -0.5
        elif param.init == "normal_out":
            std /= (2 * spec.layers) ** 0.5

        out = np.empty(box.shape, np.float32)
        for number, block in _blocks(box, param.shape):
            # Counters of blocks are so far apart that their streams never meet.
            generator = np.random.Generator(np.random.Philox(key=key, counter=number << 128))
            values = generator.standard_normal(block.shape, np.float32)
            overlap = block & box
            out[overlap.within(box)] = values[overlap.within(block)]
        out *= np.float32(std)
        return torch.from_numpy(out).to(dtype)

    return source


def _hash_number(text: str, num_bytes: int) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:num_bytes], "little")


def _blocks(box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, Box]]:
    """Blocks of a weight of this shape that a box overlaps, each with its number, row by row."""
    if not box:
        return
    # 1. Sizes of a block, and blocks side by side. A vector is cut along its one dim.
    if len(shape) > 1:
        sizes = (*BLOCK, *shape[2:])
        per_row = -(-shape[1] // BLOCK[1])
    else:
        sizes = (BLOCK[0] * BLOCK[1],)
        per_row = 1

    # 2. Blocks of the grid that the box has a part of.
    grid = []
    for first, last, size in zip(box.start, box.stop, sizes):
        grid.append(range(first // size, -(-last // size)))
    for place in product(*grid):
        start = tuple(index * size for index, size in zip(place, sizes))
        stop = tuple(min(first + size, end) for first, size, end in zip(start, sizes, shape))
        number = place[0] * per_row + sum(place[1:])
        yield number, Box(start, stop)


def fingerprint(home: Home, world: World) -> int | None:
    """A number that tells other weights that are not trained from these, whatever the layout: the
    sum of their bits, each weight's times a number made from its name.
    None where all are trained. Collective."""
    if not any(param.frozen for param in home.spec.params):
        return None
    total = torch.zeros((), dtype=torch.int64, device=world.device)
    for shard in home.shards:
        if not shard.owned or not shard.bucket.frozen:
            continue
        for name, _, view in shard.views(home.flat(shard, "master")):
            # A sum of bits is the same in any order, so for any layout.
            bits = view.view(BITS[view.itemsize]).sum(dtype=torch.int64)
            total += bits * _hash_number(name, 4)
    return int(world.everyone.all_reduce(total))
