"""A model in the numbers that rate cards and FLOP conventions take."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from longshift.cluster.cluster import Number
from longshift.spec.model import ModelSpec


@dataclass(frozen=True)
class Sizes:
    """A model in numbers.

    inner            query heads * head width
    block_elements   weights of a block's matmuls
    uncut_elements   those of them that tensor parallelism does not cut: experts and their router
    kv_elements      those of them of keys and values: ranks beyond the `kv_heads` have copies
    idle_elements    those of experts that a token does not pass
    head_elements    weights of the head
    tied             1 where embeddings are the head's weights, else 0
    trained          trained weights of a block over those of its matmuls
    head_trained     the same of the head
    """

    layers: int
    inner: int
    block_elements: int
    head_elements: int
    tied: int
    trained: float = 1.0
    head_trained: float = 1.0
    uncut_elements: int = 0
    idle_elements: int = 0
    kv_elements: int = 0
    kv_heads: int = 1

    def rank_elements(self, weight_ranks: Number) -> Number:
        """Weights of a block's matmuls on each of so many tensor-parallel ranks."""
        cut_elements = self.block_elements - self.uncut_elements - self.kv_elements
        kv_ranks = np.minimum(weight_ranks, self.kv_heads)
        return cut_elements / weight_ranks + self.kv_elements / kv_ranks + self.uncut_elements


@lru_cache(maxsize=64)
def sizes(spec: ModelSpec) -> Sizes:
    """Sizes of a model."""
    factors = [param for param in spec.base.of_unit(1) if len(param.shape) == 2]
    block_elements = sum(param.elements for param in factors)
    head_elements = spec.width * spec.vocab

    # Adapters count too: they are trained, and no weights of a block's own matmuls.
    trained = head_trained = 1.0
    if spec.learned != spec.parameters:
        learned = [param for param in spec.params if not param.frozen]
        head_unit = spec.layers + 1
        in_blocks = sum(param.elements for param in learned if 1 <= param.unit <= spec.layers)
        in_head = 0
        for param in learned:
            if len(param.shape) > 1 and head_unit in (param.unit, param.also_unit):
                in_head += param.elements
        trained = in_blocks / (spec.layers * block_elements)
        head_trained = in_head / head_elements
    return Sizes(
        layers=spec.layers,
        inner=spec.heads * spec.head_width,
        block_elements=block_elements,
        head_elements=head_elements,
        tied=int(spec.tied),
        trained=trained,
        head_trained=head_trained,
        uncut_elements=sum(param.elements for param in factors if param.dim is None),
        idle_elements=block_elements - sum(map(spec.token_elements, factors)),
        kv_elements=2 * spec.width * spec.kv_heads * spec.head_width,
        kv_heads=spec.kv_heads,
    )
