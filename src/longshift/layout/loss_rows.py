"""In how many blocks of rows the loss of a pack or chunk is computed, so that no logits tensor holds all of them."""

from longshift.spec.model import ModelSpec

LEAST_ROWS = 1024  # fewer make small matmuls, and the head's weight gradient is added to its sum once for each


def loss_rows(spec: ModelSpec, rows: int) -> int:
    """Of so many rows of the residual stream, a pack's or a chunk's, how many have logits at one time, at the most: as many as make them no
    larger than the rows are, but no fewer than LEAST_ROWS."""
    return max(LEAST_ROWS, rows * spec.width // spec.vocab)


def loss_blocks(spec: ModelSpec, rows: int) -> int:
    """In how many blocks of `loss_rows` the loss of so many rows is computed."""
    return -(-rows // loss_rows(spec, rows))
