"""Candidates: every layout of whole packs that a model and a world allow, as arrays; and why each of the others is refused.

A candidate is a mesh (tp, ulysses, ring, dp, pp, virtual), an order of the pipeline and its policies (ZeRO, recomputation). The rules are
those of `layout.legal`, on arrays. Beyond these a candidate is refused that is another one under a second name, or can never be better
than it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from longshift.errors import UsageError, did_you_mean
from longshift.layout.layout import Layout
from longshift.layout.legal import cut_inside_a_block
from longshift.simulate.cost import RECOMPUTE, recompute_code
from longshift.spec.model import ModelSpec

VIRTUAL = (1, 2, 4, 8)  # model chunks a pipeline rank: the bubble halves with each, and messages double
ZERO = (0, 1, 2, 3)
ORDERS = ("1f1b", "gpipe")  # codes: positions here
AXES = ("tp", "ulysses", "ring", "dp", "pp")
CHOICES = (*AXES, "virtual", "order", "zero", "recompute")  # what a person can fix

Fixed = Mapping[str, Sequence[int | str]]


@dataclass(frozen=True, eq=False)
class Candidates:
    """Candidates as arrays of one length, int64. `order`, `recompute`: codes of ORDERS and of `simulate.cost.RECOMPUTE`."""

    tp: np.ndarray
    ulysses: np.ndarray
    ring: np.ndarray
    dp: np.ndarray
    pp: np.ndarray
    virtual: np.ndarray
    order: np.ndarray
    zero: np.ndarray
    recompute: np.ndarray

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, index: np.ndarray | slice) -> "Candidates":
        """Some of the candidates, by index, mask or slice."""
        return Candidates(*(getattr(self, f.name)[index] for f in fields(self)))

    def columns(self) -> np.ndarray:
        """int64 [candidates, 9], the fields in their order."""
        return np.stack([getattr(self, f.name) for f in fields(self)], 1)

    @property
    def holders(self) -> np.ndarray:
        """Ranks that compute with the same weights."""
        return self.dp * self.ulysses * self.ring

    def layout(self, index: int) -> Layout:
        """The candidate as a layout."""
        one = {f.name: int(getattr(self, f.name)[index]) for f in fields(self)}
        order, recompute = ORDERS[one.pop("order")], RECOMPUTE[one.pop("recompute")]
        return Layout(**one, order=order, recompute=recompute)  # pyright: ignore[reportArgumentType]

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> "Candidates":
        """Candidates of whole packs as candidates."""
        rows = [
            (*(getattr(one, name) for name in AXES), one.virtual, ORDERS.index(one.order), one.zero, recompute_code(one)) for one in layouts
        ]
        return cls(*np.array(rows, np.int64).reshape(len(rows), 9).T)


@dataclass(frozen=True, eq=False)
class Enumeration:
    """The candidates that are possible. `refused`: number of the others by reason, each under its first one; `total`: of all."""

    candidates: Candidates
    refused: Mapping[str, int]
    total: int


def enumerate_layouts(spec: ModelSpec, world: int, fixed: Fixed | None = None, float8: bool = False) -> Enumeration:
    """Every candidate on `world` ranks whose choices are among those `fixed`. `float8`: whether matmuls take factors of eight bits. Raises
    UsageError for a choice that does not exist."""
    choices = _choices(world, fixed or {})
    grid = _product([choices[name] for name in ("tp", "ulysses", "ring", "pp")])
    tp, ulysses, ring, pp = grid[world % grid.prod(1) == 0].T
    dp = world // (tp * ulysses * ring * pp)
    here = np.isin(dp, choices["dp"])
    meshes = np.stack([tp, ulysses, ring, dp, pp], 1)[here]
    policies = _product([choices[name] for name in ("virtual", "order", "zero", "recompute")])
    of_order = np.lexsort(meshes.T)
    whole = np.concatenate([np.repeat(meshes[of_order], len(policies), 0), np.tile(policies, (len(meshes), 1))], 1)
    everything = Candidates(*np.ascontiguousarray(whole.T))
    possible, refused = np.ones(len(everything), bool), dict[str, int]()
    for reason, wrong in {**illegal(spec, everything, float8), **_second_names(everything, choices)}.items():
        if count := int((wrong & possible).sum()):
            refused[reason] = count
        possible &= ~wrong
    return Enumeration(everything.take(possible), refused, len(everything))


def illegal(spec: ModelSpec, at: Candidates, float8: bool = False) -> dict[str, np.ndarray]:
    """Which candidates break each rule of `layout.legal`, bool [candidates] by reason."""
    stages = at.pp * at.virtual
    cut = [tp for tp in np.unique(at.tp).tolist() if tp <= spec.heads and cut_inside_a_block(spec, tp)] if float8 else []
    return {
        f"tp above {spec.heads} query heads": at.tp > spec.heads,
        f"tp above {spec.ffn} feed-forward columns": at.tp > spec.ffn,
        f"tp above {spec.vocab} vocabulary rows": at.tp > spec.vocab,
        f"tp that does not divide {spec.kv_heads} key/value heads": spec.keys_stay_whole & (spec.kv_heads % at.tp > 0),
        "tp that cuts blocks of a scale of float8": np.isin(at.tp, cut),
        "ulysses above the query heads of a tensor-parallel rank": (at.tp <= spec.heads) & (spec.heads // at.tp < at.ulysses),
        "virtual stages without a pipeline": (at.virtual > 1) & (at.pp == 1),
        "virtual stages under gpipe": (at.virtual > 1) & (at.order == ORDERS.index("gpipe")),
        f"stages without one of {spec.layers} blocks": stages > spec.layers,
    }


def unevenness(spec: ModelSpec, at: Candidates) -> np.ndarray:
    """How much longer than the mean rank's the turn of the rank with most query heads takes, float64 [candidates]: 1 where they divide."""
    ranks = at.tp * at.ulysses
    return np.ceil(np.ceil(spec.heads / at.tp) / at.ulysses) * ranks / spec.heads


def _choices(world: int, fixed: Fixed) -> dict[str, np.ndarray]:
    """Codes of each choice, ascending."""
    for name in fixed:
        if name not in CHOICES:
            raise UsageError(f"{name!r} is nothing that a plan chooses{did_you_mean(name, CHOICES)}")
    divisors = [n for n in range(1, int(world**0.5) + 1) if world % n == 0]
    divisors = sorted({*divisors, *(world // n for n in divisors)})
    known: dict[str, Sequence[int | str]] = dict.fromkeys(AXES, divisors)
    known |= {"virtual": VIRTUAL, "order": ORDERS[:1], "zero": ZERO, "recompute": RECOMPUTE}
    words = {"order": ORDERS, "recompute": RECOMPUTE}
    found = {}
    for name, values in {**known, **fixed}.items():
        if name in words and (unknown := [str(value) for value in values if value not in words[name]]):
            raise UsageError(f"{name} {unknown[0]!r} does not exist{did_you_mean(unknown[0], words[name])}")
        found[name] = np.unique([words[name].index(str(v)) if name in words else int(v) for v in values]).astype(np.int64)
    return found


def _second_names(at: Candidates, choices: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Candidates that are others, where these are among the choices."""
    least = int(choices["zero"].min())
    return {
        f"ZeRO above z{least} where one rank holds each weight": (at.holders == 1) & (at.zero > least),
        "gpipe without a pipeline": (at.pp == 1) & (at.order == ORDERS.index("gpipe")) & (len(choices["order"]) > 1),
    }


def _product(values: Sequence[np.ndarray]) -> np.ndarray:
    """int64 [combinations, values], the last varying fastest."""
    return np.stack([grid.reshape(-1) for grid in np.meshgrid(*values, indexing="ij")], 1)
