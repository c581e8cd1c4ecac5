"""What tests/many/test_transfer.py runs in forked worlds."""

import torch

from longshift.dist.world import World
from longshift.layout.layout import Layout
from longshift.layout.placement import buckets
from longshift.state.home import Home
from longshift.state.transfer import Visit
from longshift.train.check import Trial


def there_and_back(world: World, trial: dict, home: str, guest: str, dtype: str) -> dict[str, bool]:
    """Lend home's weights to a guest, then give the same values back as gradients: are both bitwise what they were?"""
    what, number = Trial.from_json(trial), getattr(torch, dtype)
    source, device = what.source(), world.device
    here = Home(what.spec, buckets(what.spec, Layout.parse(home)), world.rank, number, device, source)
    there = Home(what.spec, buckets(what.spec, Layout.parse(guest)), world.rank, number, device, lambda _, box: torch.zeros(box.shape))
    visit = Visit(here, there, world)
    visit.lend()
    lent = all(torch.equal(view, source(name, box).to(number)) for s in there.shards for name, box, view in s.views(s.master))
    for shard in there.shards:
        shard.grad = shard.master.clone()
    visit.give_back()
    returned = all(s.grad is not None and torch.equal(s.grad, s.master) for s in here.shards)
    moved = any(m.source != m.target for m in visit.there)
    return {"lent": lent, "returned": returned, "moved": moved, "emptied": all(s.grad is None for s in there.shards)}
