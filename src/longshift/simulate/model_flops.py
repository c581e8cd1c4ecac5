"""Model FLOP of a step, and their share of a device's peak (MFU), in each convention of the
field."""

from collections.abc import Mapping

import numpy as np

from longshift.cluster.cluster import Number
from longshift.simulate.sizes import Sizes


def model_flops(
    sizes: Sizes, tokens: Number, pairs: Number, parameters: Number
) -> dict[str, np.ndarray]:
    """FLOP of one step of `tokens` with so many causal `pairs`, in each convention of the field
    that divides by seconds and peak to an MFU. `parameters`: those that a token passes, tied ones
    once."""
    tokens = np.asarray(tokens, dtype=float)
    pairs = np.asarray(pairs, dtype=float)
    weights = sizes.layers * (sizes.block_elements - sizes.idle_elements)
    # Two products forward and four backward, of 2 FLOP a pair and element of a head.
    scores = 12.0 * sizes.layers * sizes.inner * pairs

    with_head = 6.0 * (weights + sizes.head_elements) * tokens
    # Computing blocks again is 2 FLOP more for each weight, and a third more of the scores.
    recomputed = (8.0 * weights + 6.0 * sizes.head_elements) * tokens + 2 * scores * 4 / 3
    return {
        "6N": 6.0 * parameters * tokens,
        "6N blocks": 6.0 * weights * tokens,
        "causal": with_head + scores,
        "full square": with_head + 2 * scores,
        "full square, recomputed": recomputed,
    }


def mfu(
    flops: Mapping[str, np.ndarray], seconds: Number, ranks: Number, peak_flops_per_s: float
) -> dict[str, np.ndarray]:
    """Model FLOP/s over the devices' peak, by the conventions of `model_flops`."""
    return {
        name: value / (np.asarray(seconds) * ranks * peak_flops_per_s)
        for name, value in flops.items()
    }
