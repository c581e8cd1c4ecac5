"""Views of tensors that last, and of gradient sums, which are other tensors in every step: made
once, and good for every step."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from longshift.state.home import Shard


class _InSum(NamedTuple):
    """Where a view lies in the gradient sum of a shard."""

    shard: Shard
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Views:
    """Views of tensors that last, and of the gradient sums of `renewed`, which are other tensors in
    every step. Immutable."""

    def __init__(self, views: Iterable[Tensor], renewed: Iterable[Shard]):
        """Take `views` while the gradient sums are there."""
        owners = {
            shard.grad.untyped_storage().data_ptr(): shard
            for shard in renewed
            if shard.grad is not None
        }
        self._views = [
            self._kept(view, owners.get(view.untyped_storage().data_ptr())) for view in views
        ]
        self._last = all(isinstance(view, Tensor) for view in self._views)

    @staticmethod
    def _kept(view: Tensor, shard: Shard | None) -> "Tensor | _InSum":
        if shard is None or shard.grad is None:
            return view
        return _InSum(
            shard,
            tuple(view.shape),
            view.stride(),
            int(view.storage_offset() - shard.grad.storage_offset()),
        )

    def now(self) -> list[Tensor]:
        """The views, of the gradient sums that are there now."""
        return (
            self._views
            if self._last
            else [view if isinstance(view, Tensor) else _of_sum(view) for view in self._views]
        )  # pyright: ignore[reportReturnType]


def _of_sum(view: _InSum) -> Tensor:
    grad = view.shard.grad
    assert grad is not None
    return grad.as_strided(view.size, view.stride, view.offset + grad.storage_offset())
