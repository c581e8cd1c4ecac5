"""Layouts that a world can have, as arrays: every way to cut it into axes, with every policy."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from longshift.layout.layout import Layout
from longshift.simulate.closed import Candidates
from longshift.simulate.cost import RECOMPUTE
from longshift.spec.model import ModelSpec

POLICIES = ("none", "selective", "full", "full.keep-output")  # of RECOMPUTE, those that are tried
VIRTUAL = (1, 2, 4)  # model chunks of a pipeline rank that are tried
WORDS = {"tp": "tp", "u": "ulysses", "ring": "ring", "dp": "dp", "pp": "pp", "v": "virtual", "z": "zero"}


@dataclass(frozen=True)
class Layouts:
    """Layouts as arrays, int64 [layouts]; `recompute`: codes of `simulate.cost.RECOMPUTE`."""

    tp: np.ndarray
    ulysses: np.ndarray
    ring: np.ndarray
    dp: np.ndarray
    pp: np.ndarray
    virtual: np.ndarray
    zero: np.ndarray
    recompute: np.ndarray

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def holders(self) -> np.ndarray:
        """Ranks that share one cut of the weights."""
        return self.dp * self.ulysses * self.ring

    def take(self, index: np.ndarray) -> "Layouts":
        """Some of them."""
        return Layouts(*(getattr(self, field.name)[index] for field in fields(self)))

    def layout(self, index: int) -> Layout:
        """One of them."""
        numbers = {name: int(getattr(self, name)[index]) for name in WORDS.values()}
        policy, _, keep = RECOMPUTE[self.recompute[index]].partition(".")
        return Layout(**numbers, recompute=policy, keep_output=bool(keep))  # pyright: ignore[reportArgumentType]

    def candidates(self, micros: np.ndarray, tokens: np.ndarray | float, pairs: np.ndarray | float) -> Candidates:
        """With what a step has for each."""
        numbers = {field.name: getattr(self, field.name) for field in fields(self)}
        return Candidates(**numbers, micros=micros, tokens=tokens, pairs=pairs)


def layouts_of(spec: ModelSpec, world: int, fixed: Mapping[str, Sequence[int]]) -> tuple[Layouts, Counter[str]]:
    """All layouts of a world that the model can have, as `layout.legal` has it, and how many were refused, by reason. `fixed`: by word of a
    layout, the numbers that it may have."""
    meshes = np.array(list(_products(world, 5)), np.int64).reshape(-1, 5)
    grid = np.stack(np.meshgrid(np.arange(len(meshes)), VIRTUAL, range(4), range(len(POLICIES)), indexing="ij"), -1).reshape(-1, 4)
    tp, ulysses, ring, dp, pp = meshes[grid[:, 0]].T
    codes = np.array([RECOMPUTE.index(policy) for policy in POLICIES])
    found = Layouts(tp, ulysses, ring, dp, pp, grid[:, 1], grid[:, 2], codes[grid[:, 3]])
    reasons = {
        "more tensor-parallel ranks than query heads": tp > spec.heads,
        "more tensor-parallel ranks than feed-forward columns": tp > spec.ffn,
        "more Ulysses ranks than query heads of a rank": ulysses > np.maximum(spec.heads // np.minimum(tp, spec.heads), 1),
        "more stages than blocks": found.pp * found.virtual > spec.layers,
        "model chunks without a pipeline": (found.virtual > 1) & (pp == 1),
        "nobody to share state with": (found.zero > 0) & (found.holders == 1),
    }
    for word, numbers in fixed.items():
        reasons[f"{word} is fixed"] = ~np.isin(getattr(found, WORDS[word]), numbers)
    refused, counted = np.zeros(len(found), bool), Counter[str]()
    for reason, true in reasons.items():
        counted[reason] = int(np.count_nonzero(true & ~refused))
        refused |= true
    return found.take(np.flatnonzero(~refused)), Counter({reason: count for reason, count in counted.items() if count})


def _products(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `number` as an ordered product of `count` factors."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in _products(number // first, count - 1))
