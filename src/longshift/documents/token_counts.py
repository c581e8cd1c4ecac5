"""Counts of a token cache while it is written, and what they say against its masks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from longshift.documents.sources import File
from longshift.errors import DataError


@dataclass
class TokenCounts:
    """What is counted while tokens are written. Mutable.

    `lengths`: of each document. `documents`: of each file. `learned`, `targets`: by source, tokens
    that are learned and those that could be. `masked`: sources whose documents have masks.
    """

    lengths: list[int] = field(default_factory=list)
    documents: Counter[int] = field(default_factory=Counter)
    learned: Counter[int] = field(default_factory=Counter)
    targets: Counter[int] = field(default_factory=Counter)
    masked: set[int] = field(default_factory=set)

    def add(self, file_index: int, source: int, mask: np.ndarray) -> None:
        """Count a document. Its first token is no target."""
        self.lengths.append(len(mask))
        self.documents[file_index] += 1
        self.learned[source] += int(mask[1:].sum())
        self.targets[source] += len(mask) - 1

    def check_masks(self, inputs: Sequence[tuple[int, File]]) -> None:
        """Raise DataError for a source of conversations of which nothing is learned, or all."""
        # Reversed, the first file of each source is the one that the dict keeps.
        for source, file in dict(reversed(inputs)).items():
            total = self.targets[source]
            learned = self.learned[source]
            if source not in self.masked:
                continue
            if learned == 0:
                raise DataError(
                    f"{file.path}: not one of {total} tokens would be learned; look at them with"
                    " longshift data CONFIG"
                )
            is_chosen = file.format != "function" and file.learn in ("assistant", "last")
            if is_chosen and learned == total:
                raise DataError(
                    f"{file.path}: all {total} tokens would be learned, not only what the assistant"
                    " says: the template marks everything; to mean that, write learn: all"
                )
