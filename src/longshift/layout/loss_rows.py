"""In how many blocks of rows the loss of a pack or chunk is computed, so that no logits tensor
holds all of them."""

import numpy as np

from longshift.cluster.cluster import Number
from longshift.spec.model import LOSS_ROWS, ModelSpec


def rows_at_once(
    rows: Number,
    width: Number,
    vocab: Number,
    min_rows: int = LOSS_ROWS,
) -> np.ndarray:
    """How many of the rows of a pack or chunk have logits at one time, at most. Numbers or arrays
    that broadcast.

    `rows`, `width`: of the residual stream.
    `min_rows`: below which matmuls get slow.
    """
    # Logits are as large as the residual stream then.
    return np.maximum(min_rows, np.asarray(rows) * width // vocab)


def loss_rows(spec: ModelSpec, rows: int) -> int:
    """Rows that have logits at one time: see `rows_at_once`."""
    return int(rows_at_once(rows, spec.width, spec.vocab, spec.loss_rows))


def loss_blocks(spec: ModelSpec, rows: int) -> int:
    """In how many blocks of `loss_rows` the loss of so many rows is computed."""
    return -(-rows // loss_rows(spec, rows))
