"""Candidates: every layout of whole packs that a model and a world allow, as arrays; and why each
of the others is refused.

A candidate is a mesh (a degree of each axis, virtual stages), an order of the pipeline and its
policies (ZeRO, recomputation). The rules are those of `layout.legal`. A candidate is also refused
if it is another one under a second name, or can never be better than it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longshift.errors import UsageError, did_you_mean
from longshift.layout import axes
from longshift.layout.axes import Degrees
from longshift.layout.layout import Layout
from longshift.layout.legal import mesh_faults, pipeline_faults
from longshift.simulate.cost import RECOMPUTE, recompute_code
from longshift.spec.model import ModelSpec

# Model chunks a pipeline rank: the bubble halves with each, and messages double.
VIRTUAL = (1, 2, 4, 8)
ZERO = (0, 1, 2, 3)
ORDERS = ("1f1b", "gpipe")  # codes: positions here
POLICIES = ("virtual", "order", "zero", "recompute")

Fixed = Mapping[str, Sequence[int | str]]


def choice_names() -> tuple[str, ...]:
    """What a person can fix: degrees, then policies."""
    return (*axes.names(), *POLICIES)


def mesh_names() -> tuple[str, ...]:
    """Choices that say which rank computes what."""
    return (*axes.names(), "virtual")


def cut_names() -> tuple[str, ...]:
    """Choices that cut the weights."""
    return (*(axis.name for axis in axes.cut_axes()), "virtual")


def mesh_choices(layout: Layout, names: Sequence[str]) -> tuple[int, ...]:
    """What a layout has for each of `mesh_names` or `cut_names`."""
    return tuple(layout.virtual if name == "virtual" else layout.degree(name) for name in names)


@dataclass(frozen=True, eq=False)
class Candidates(Degrees[np.ndarray]):
    """Candidates as arrays of one length, int64.

    `codes`: by name of a choice, degrees and numbers of policies; those of `order` and `recompute`
    are positions in ORDERS and in `simulate.cost.RECOMPUTE`.
    """

    codes: Mapping[str, np.ndarray]

    @property
    def dp(self) -> np.ndarray:
        """Replicas, which share the packs."""
        return self.codes["dp"]

    @property
    def pp(self) -> np.ndarray:
        """Pipeline stages."""
        return self.codes["pp"]

    @property
    def virtual(self) -> np.ndarray:
        """Model chunks of a pipeline rank."""
        return self.codes["virtual"]

    @property
    def order(self) -> np.ndarray:
        """Orders of the pipeline, as positions in ORDERS."""
        return self.codes["order"]

    @property
    def zero(self) -> np.ndarray:
        """ZeRO stages."""
        return self.codes["zero"]

    @property
    def recompute(self) -> np.ndarray:
        """Recomputation, as positions in `simulate.cost.RECOMPUTE`."""
        return self.codes["recompute"]

    def __len__(self) -> int:
        return len(self.zero)

    def take(self, index: np.ndarray | slice) -> "Candidates":
        """The candidates at an index, mask or slice."""
        return Candidates({name: column[index] for name, column in self.codes.items()})

    def columns(self, names: Sequence[str] = ()) -> np.ndarray:
        """Choices side by side, int64 [candidates, names]; all of them without `names`."""
        return np.stack([self.codes[name] for name in names or choice_names()], 1)

    def degree(self, axis: str) -> np.ndarray:
        return self.codes[axis]

    def layout(self, index: int) -> Layout:
        """One candidate as a layout."""
        values: dict[str, Any] = {name: int(column[index]) for name, column in self.codes.items()}
        degrees = {name: values.pop(name) for name in axes.names()}
        values["order"] = ORDERS[values["order"]]
        values["recompute"] = RECOMPUTE[values["recompute"]]
        return Layout(**values).with_degrees(degrees)

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> "Candidates":
        """Layouts of whole packs as candidates."""
        rows = []
        for layout in layouts:
            order = ORDERS.index(layout.order)
            policies = [layout.virtual, order, layout.zero, recompute_code(layout)]
            rows.append([*map(layout.degree, axes.names()), *policies])
        return cls.from_rows(np.array(rows, np.int64).reshape(len(rows), len(choice_names())))

    @classmethod
    def from_rows(cls, rows: np.ndarray) -> "Candidates":
        """From int64 [candidates, choices]."""
        columns = np.ascontiguousarray(rows.T)
        return cls(dict(zip(choice_names(), columns)))


@dataclass(frozen=True, eq=False)
class Enumeration:
    """The candidates that are possible.

    `refused`: number of the others by reason, each under its first one.
    `total`: number of all.
    """

    candidates: Candidates
    refused: Mapping[str, int]
    total: int


def enumerate_layouts(
    spec: ModelSpec,
    world: int,
    fixed: Fixed | None = None,
    float8: bool = False,
) -> Enumeration:
    """Enumerate the candidates on `world` ranks whose choices are among those `fixed`.

    `float8`: whether matmuls take factors of eight bits.
    Raises UsageError for a choice that does not exist.
    """
    choices = _choices(world, fixed or {})

    # 1. Meshes: every product of the other degrees that divides the world leaves one for dp.
    names = axes.names()
    free_names = [name for name in names if name != "dp"]
    grid = _product([choices[name] for name in free_names])
    grid = grid[world % grid.prod(1) == 0]
    dp_column = names.index("dp")
    meshes = np.insert(grid, dp_column, world // grid.prod(1), axis=1)
    meshes = meshes[np.isin(meshes[:, dp_column], choices["dp"])]
    meshes = meshes[np.lexsort(meshes.T)]

    # 2. Each with every policy.
    policies = _product([choices[name] for name in POLICIES])
    rows = np.hstack([np.repeat(meshes, len(policies), 0), np.tile(policies, (len(meshes), 1))])
    candidates = Candidates.from_rows(rows)

    # 3. Refuse.
    is_possible = np.ones(len(candidates), bool)
    refused: dict[str, int] = {}
    reasons = violations(spec, candidates, float8) | _second_names(spec, candidates, choices)
    for reason, is_wrong in reasons.items():
        if count := int((is_wrong & is_possible).sum()):
            refused[reason] = count
        is_possible &= ~is_wrong
    return Enumeration(candidates.take(is_possible), refused, len(candidates))


def violations(
    spec: ModelSpec,
    candidates: Candidates,
    float8: bool = False,
) -> dict[str, np.ndarray]:
    """Which candidates break each rule of `layout.legal`, bool [candidates] by rule."""
    mesh = [axis.name for axis in axes.token_axes()]
    checks = (
        (mesh, lambda layout: mesh_faults(spec, layout, float8)),
        (["pp", "virtual", "order"], lambda layout: pipeline_faults(spec, layout)),
    )
    is_broken: dict[str, np.ndarray] = {}
    for names, find_faults in checks:
        # Many candidates share the degrees that a check asks for: ask once for each distinct row.
        _, first, row = np.unique(
            candidates.columns(names),
            axis=0,
            return_index=True,
            return_inverse=True,
        )
        rows_by_rule: dict[str, list[int]] = {}
        for number, index in enumerate(first.tolist()):
            for fault in find_faults(candidates.layout(index)):
                rows_by_rule.setdefault(fault.rule, []).append(number)
        for rule, rows in rows_by_rule.items():
            is_broken[rule] = np.isin(row.reshape(-1), rows)
    return is_broken


def unevenness(spec: ModelSpec, candidates: Candidates) -> np.ndarray:
    """Time of the rank with most query heads over the mean rank's, float64 [candidates]; 1 where
    they divide."""
    tp = candidates.degree("tp")
    ulysses = candidates.degree("ulysses")
    return np.ceil(np.ceil(spec.heads / tp) / ulysses) * tp * ulysses / spec.heads


def _choices(world: int, fixed: Fixed) -> dict[str, np.ndarray]:
    """Codes of each choice, ascending."""
    for name in fixed:
        if name not in choice_names():
            hint = did_you_mean(name, choice_names())
            raise UsageError(f"{name!r} is nothing that a plan chooses{hint}")
    divisors = [n for n in range(1, int(world**0.5) + 1) if world % n == 0]
    divisors = sorted({*divisors, *(world // n for n in divisors)})

    # Of the orders 1F1B alone is free: gpipe has its bubble, and keeps more packs.
    values_by_name: dict[str, Sequence[int | str]] = dict.fromkeys(axes.names(), divisors)
    values_by_name |= {
        "virtual": VIRTUAL,
        "order": ORDERS[:1],
        "zero": ZERO,
        "recompute": RECOMPUTE,
    }
    values_by_name |= fixed
    for name, words in (("order", ORDERS), ("recompute", RECOMPUTE)):
        values_by_name[name] = [_code(name, words, str(value)) for value in values_by_name[name]]
    return {name: np.unique(np.array(values, np.int64)) for name, values in values_by_name.items()}


def _code(name: str, words: Sequence[str], word: str) -> int:
    if word not in words:
        raise UsageError(f"{name} {word!r} does not exist{did_you_mean(word, words)}")
    return words.index(word)


def _second_names(
    spec: ModelSpec,
    candidates: Candidates,
    choices: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Which candidates are others under a second name, bool [candidates] by reason."""
    min_zero = int(choices["zero"].min())
    is_alone = candidates.state_holders(spec.experts > 0) == 1
    is_gpipe = candidates.order == ORDERS.index("gpipe")
    # Without a pipeline all orders are alike: gpipe is dropped where another one can be chosen.
    has_another = len(choices["order"]) > 1
    needless_zero = f"ZeRO above z{min_zero} where one rank holds each weight"
    return {
        needless_zero: is_alone & (candidates.zero > min_zero),
        "gpipe without a pipeline": (candidates.pp == 1) & is_gpipe & has_another,
    }


def _product(values: Sequence[np.ndarray]) -> np.ndarray:
    """Every combination, int64 [combinations, values], the last varying fastest."""
    grids = np.meshgrid(*values, indexing="ij")
    return np.stack([grid.reshape(-1) for grid in grids], 1)
