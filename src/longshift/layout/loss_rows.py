"""In how many blocks of rows the loss of a pack or chunk is computed, so that no logits tensor holds all of them."""

import numpy as np

from longshift.cluster.cluster import Number
from longshift.layout.layout import Layout
from longshift.spec.model import ModelSpec

LEAST_ROWS = 1024  # fewer make small matmuls, and the head's weights and the sum of their gradients are read once for each block


def rows_at_once(rows: Number, width: Number, vocab: Number) -> np.ndarray:
    """Of so many rows of a residual stream of this width, a pack's or a chunk's, how many have logits at one time, at the most: as many as
    make them no larger than the rows are, but no fewer than LEAST_ROWS. Numbers or arrays that broadcast."""
    return np.maximum(LEAST_ROWS, np.asarray(rows) * width // vocab)


def loss_rows(spec: ModelSpec, layout: Layout, rows: int) -> int:
    """Rows that have logits at one time: the layout's own number, or see `rows_at_once`."""
    return layout.rows if layout.rows > 0 else int(rows_at_once(rows, spec.width, spec.vocab))


def loss_blocks(spec: ModelSpec, layout: Layout, rows: int) -> int:
    """In how many blocks of `loss_rows` the loss of so many rows is computed."""
    return -(-rows // loss_rows(spec, layout, rows))
