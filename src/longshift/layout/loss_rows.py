"""In how many blocks of rows the loss of a pack or chunk is computed, so that no logits tensor holds all of them."""

import numpy as np

from longshift.cluster.cluster import Number
from longshift.spec.model import LOSS_ROWS, ModelSpec


def rows_at_once(rows: Number, width: Number, vocab: Number, least: int = LOSS_ROWS) -> np.ndarray:
    """Of so many rows of a residual stream of this width, a pack's or a chunk's, how many have logits at one time, at the most: as many as
    make them no larger than the rows are, but no fewer than `least`. Numbers or arrays that broadcast."""
    return np.maximum(least, np.asarray(rows) * width // vocab)


def loss_rows(spec: ModelSpec, rows: int) -> int:
    """Rows that have logits at one time: see `rows_at_once`."""
    return int(rows_at_once(rows, spec.width, spec.vocab, spec.loss_rows))


def loss_blocks(spec: ModelSpec, rows: int) -> int:
    """In how many blocks of `loss_rows` the loss of so many rows is computed."""
    return -(-rows // loss_rows(spec, rows))
