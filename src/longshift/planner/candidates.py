"""Candidates: every layout of whole packs that a model and a world allow, as arrays; and why each of the others is refused.

A candidate is a mesh (a degree of each axis, virtual stages), an order of the pipeline and its policies (ZeRO, recomputation). The rules
are those of `layout.legal`. Beyond these a candidate is refused that is another one under a second name, or can never be better
than it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from longshift.errors import UsageError, did_you_mean
from longshift.layout import axes
from longshift.layout.axes import Axis
from longshift.layout.layout import Layout
from longshift.layout.legal import mesh_faults, pipeline_faults
from longshift.simulate.cost import RECOMPUTE, recompute_code
from longshift.spec.model import ModelSpec

VIRTUAL = (1, 2, 4, 8)  # model chunks a pipeline rank: the bubble halves with each, and messages double
ZERO = (0, 1, 2, 3)
ORDERS = ("1f1b", "gpipe")  # codes: positions here
CHOICES = (*axes.names(), "virtual", "order", "zero", "recompute")  # what a person can fix

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

    def degree(self, axis: str) -> np.ndarray:
        return getattr(self, axis)

    def _ranks_along(self, along: Sequence[Axis]) -> np.ndarray:
        return np.prod([self.degree(axis.name) for axis in along], axis=0)

    @property
    def holders(self) -> np.ndarray:
        """Ranks that compute with the same weights."""
        return self._ranks_along(axes.holder_axes())

    @property
    def weight_ranks(self) -> np.ndarray:
        """Ranks that a weight is cut for."""
        return self._ranks_along(axes.weight_axes())

    @property
    def sequence(self) -> np.ndarray:
        """Ranks that share the tokens of a pack."""
        return self._ranks_along(axes.token_axes())

    @property
    def world(self) -> np.ndarray:
        return self._ranks_along(axes.AXES)

    def layout(self, index: int) -> Layout:
        """The candidate as a layout."""
        values = {f.name: int(getattr(self, f.name)[index]) for f in fields(self)}
        order, recompute = ORDERS[values.pop("order")], RECOMPUTE[values.pop("recompute")]
        return Layout(**values, order=order, recompute=recompute)  # pyright: ignore[reportArgumentType]

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> "Candidates":
        """Candidates of whole packs as candidates."""
        rows = []
        for layout in layouts:
            policies = layout.virtual, ORDERS.index(layout.order), layout.zero, recompute_code(layout)
            rows.append((*map(layout.degree, axes.names()), *policies))
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
    names = axes.names()
    others = [name for name in names if name != "dp"]
    grid = _product([choices[name] for name in others])
    grid = grid[world % grid.prod(1) == 0]
    meshes = np.insert(grid, names.index("dp"), world // grid.prod(1), axis=1)
    meshes = meshes[np.isin(meshes[:, names.index("dp")], choices["dp"])]
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
    """Which candidates break each rule of `layout.legal`, bool [candidates] by rule. Rules ask for degrees that many candidates share."""
    broken: dict[str, np.ndarray] = {}
    mesh = tuple(axis.name for axis in axes.token_axes())
    asked = (
        (mesh, lambda layout: mesh_faults(spec, layout, float8)),
        (("pp", "virtual", "order"), lambda layout: pipeline_faults(spec, layout)),
    )
    for names, faults_of in asked:
        columns = np.stack([getattr(at, name) for name in names], 1)
        first, index = np.unique(columns, axis=0, return_index=True, return_inverse=True)[1:]
        rules: dict[str, list[int]] = {}
        for number, place in enumerate(first.tolist()):
            for fault in faults_of(at.layout(place)):
                rules.setdefault(fault.rule, []).append(number)
        broken |= {rule: np.isin(index.reshape(-1), numbers) for rule, numbers in rules.items()}
    return broken


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
    known: dict[str, Sequence[int | str]] = dict.fromkeys(axes.names(), divisors)
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
