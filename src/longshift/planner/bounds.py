"""Device bytes of layouts in closed form, to leave out what cannot fit before the ledger is asked: per rank of the fullest stage

    copies       of the weights in the compute format; under ZeRO-3 of two blocks, one in use and one on its way
    home         master and two moments, shared where ZeRO shares them
    sums         gradient sums in home's format: whole under ZeRO 0 and 1, shared under 2 and 3 with one block under way
    activations  what a forward keeps (`schedule.inside`, exact), for as many packs as a pipeline has under way, and one block's backward
    moving       a block's gradients, its sums on their way home under ZeRO 2 and 3, weights on their way here under 3

Not counted: the head's logits, messages, exchanges of switches.
"""

from functools import lru_cache

import numpy as np

from longshift.layout.layout import Coord
from longshift.planner.meshes import Layouts
from longshift.schedule.inside import inside
from longshift.schedule.inside_rank import Place, Transport
from longshift.schedule.sequence import token_order
from longshift.simulate.cost import RECOMPUTE
from longshift.spec.formats import Format
from longshift.spec.model import ModelSpec

SOME = 64  # tokens of a rank, of which activations are counted
MOMENTS = 2
NEARLY = 0.95  # shares that do not divide, and units that are smaller than a block, may need less


@lru_cache(maxsize=4096)
def passing_bytes(spec: ModelSpec, tp: int, ulysses: int, ring: int, code: int, itemsize: int, transport: Transport) -> float:
    """Bytes that one block needs at the most in its backward, what was kept of it included, by token of a rank."""
    one = Layouts(*(np.array([number]) for number in (tp, ulysses, ring, 1, 1, 1, 0, code)))
    place = Place(spec, one.layout(0), Coord(0, 0, 0, 0, 0), itemsize, transport)
    order = token_order([SOME * tp * ulysses * ring], ring, ulysses * tp)
    weights = sum(param.elements for param in spec.params if param.unit == 1) / tp * itemsize  # their gradients are counted elsewhere
    graph, peak = inside(place, order, "block", "forward").graph, inside(place, order, "block", "backward").peak
    return 2 * spec.width * itemsize + (graph + max(0.0, peak - weights)) / SOME


@lru_cache(maxsize=4096)
def kept_bytes(spec: ModelSpec, tp: int, ulysses: int, ring: int, code: int, itemsize: int, transport: Transport) -> float:
    """Bytes that one block's forward keeps for its backward on a rank, by token of that rank."""
    policy, _, keep = RECOMPUTE[code].partition(".")
    one = Layouts(*(np.array([number]) for number in (tp, ulysses, ring, 1, 1, 1, 0, code)))
    place = Place(spec, one.layout(0), Coord(0, 0, 0, 0, 0), itemsize, transport)
    order = token_order([SOME * tp * ulysses * ring], ring, ulysses * tp)
    if policy == "full":
        return spec.width * itemsize + (inside(place, order, "block with output", "pass").graph / SOME if keep else 0)
    return spec.width * itemsize + inside(place, order, "block", "forward").graph / SOME


def device_bytes(
    spec: ModelSpec, some: Layouts, tokens: np.ndarray, micros: np.ndarray, formats: Format, transport: Transport
) -> np.ndarray:
    """Nearly the bytes that each layout needs on a device, [layouts], with packs of `tokens` and `micros` of them on a replica."""
    block = max(sum(p.elements for p in spec.params if p.unit == unit) for unit in (1, spec.layers))
    head = spec.vocab * spec.width
    stages = some.pp * some.virtual
    blocks = np.ceil(spec.layers / stages) * some.virtual
    ends = np.where(some.pp > 1, head, head * (1 if spec.tied else 2))  # the first stage has most packs under way
    elements = (np.ceil(spec.layers / some.pp) * block + ends) / some.tp
    shared = some.holders
    copies = np.where(some.zero == 3, np.minimum(elements, block / some.tp), elements) * formats.compute_bytes
    home = (1 + MOMENTS) * elements / np.where(some.zero >= 1, shared, 1) * formats.home_bytes
    sums = elements / np.where(some.zero >= 2, shared, 1) * formats.home_bytes
    few = np.minimum(some.ring, 2)  # what a rank of a ring keeps of its own tokens is the same for any other size
    unique, inverse = np.unique(np.stack([some.tp, some.ulysses, few, some.recompute], 1), axis=0, return_inverse=True)
    here = some.tp * some.ulysses * some.ring
    kept, passing = (
        np.array([count(spec, *map(int, key), formats.compute_bytes, transport) for key in unique])[inverse.reshape(-1)] / here
        for count in (kept_bytes, passing_bytes)
    )
    flying = np.where(some.pp > 1, np.minimum(micros * some.virtual, some.pp + (some.virtual - 1) * some.pp) / some.virtual, 1)
    activations = ((np.maximum(flying, 1) * blocks - 1) * kept + passing) * tokens
    moving = np.where(some.zero >= 2, formats.home_bytes, 0) + formats.compute_bytes + np.where(some.zero == 3, formats.compute_bytes, 0)
    return NEARLY * (copies + home + sums + moving * block / some.tp + np.maximum(activations, 0))
