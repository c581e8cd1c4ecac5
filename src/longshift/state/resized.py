"""A tensor whose storage comes and goes: views of it are made once, while there is storage, and are valid whenever there is again.

Torch refuses to make a view of a tensor whose storage is too small for it; views that exist already are left alone.
"""

from torch import Tensor


class Resized:
    """A tensor that has storage between `hold` and `drop`, or none at all. Mutable."""

    def __init__(self, flat: Tensor | None):
        self.flat = flat
        self.bytes = 0 if flat is None else flat.untyped_storage().nbytes()

    def hold(self) -> None:
        """Have storage; contents are undefined where there was none."""
        if self.flat is not None:
            self.flat.untyped_storage().resize_(self.bytes)

    def drop(self) -> None:
        if self.flat is not None:
            self.flat.untyped_storage().resize_(0)

    @property
    def held(self) -> bool:
        return self.flat is not None and self.flat.untyped_storage().nbytes() == self.bytes
