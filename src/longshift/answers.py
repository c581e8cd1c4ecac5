"""What commands find, as frozen values: `to_json` is what the command prints with --json, `read` makes the value of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

from longshift.workload.lengths import Bin, CapLoss


class Reported:
    """A frozen value that is read from JSON, key by key, and is the same JSON again."""

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Self:
        """The value. Raises TypeError for a key that is not known, or one that lacks."""
        hints, names = get_type_hints(cls), {_key(of): of.name for of in fields(cls)}  # pyright: ignore[reportArgumentType]
        return cls(**{names.get(key, key): _made(hints.get(names.get(key, key), Any), value) for key, value in found.items()})

    def to_json(self) -> dict[str, Any]:
        """What the command prints with --json; what is absent there is left out."""
        own = ((of, getattr(self, of.name)) for of in fields(self))  # pyright: ignore[reportArgumentType]
        return {_key(of): _plain(value) for of, value in own if value is not None or "absent" not in of.metadata}


def _key(of: Any) -> str:
    return of.metadata.get("key", of.name)


def _made(hint: Any, value: Any) -> Any:
    """A value of JSON as the hint has it."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return None if value is None else _made(args[0], value)
    if origin is tuple:
        each = [args[0]] * len(value) if args[-1] is Ellipsis else args
        return tuple(_made(kind, one) for kind, one in zip(each, value, strict=True))
    if isinstance(hint, type) and issubclass(hint, Reported):
        return hint.read(value)
    if is_dataclass(hint) and isinstance(hint, type):
        return hint(**value)
    return Path(value) if hint is Path else value


def _plain(value: Any) -> Any:
    if isinstance(value, Reported):
        return value.to_json()
    if is_dataclass(value):
        return {of.name: _plain(getattr(value, of.name)) for of in fields(value)}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


@dataclass(frozen=True)
class CorpusFacts(Reported):
    """The documents of a config. `skipped`: path and reason of each file that gave none; `notes`: what the
    sources hold and no token shows; `quantiles`: lengths in tokens, by name, as in
    p50; `histogram`: between powers of two; `caps`: what each cap on the length would lose; `cache`: where the tokens are. Where a part is
    `learned`: how many tokens, and of a `sample` document runs of text, with whether they are learned."""

    documents: int
    tokens: int
    skipped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    quantiles: Mapping[str, int]
    histogram: tuple[Bin, ...]
    caps: tuple[CapLoss, ...]
    cache: Path
    learned: int | None = field(default=None, metadata={"absent": True})
    sample: tuple[tuple[str, bool], ...] | None = field(default=None, metadata={"absent": True})


@dataclass(frozen=True)
class CheckedLayout(Reported):
    """A layout beside one process: the largest relative differences of losses, gradients, weights and moments of the optimizer. `stage`: of
    the run, from 1; `computed`: the layout made small, as it was computed; `leaked_positions`: of `probed_positions` targets, how many see
    what they must not."""

    stage: int
    layout: str
    computed: str = field(metadata={"key": "as"})
    loss: float
    grad: float
    weight: float
    optimizer: float
    leaked_positions: int
    probed_positions: int


@dataclass(frozen=True)
class Checked(Reported):
    """Layouts beside `reference`: the worst of `rows`, and whether all are within `tolerance`, nothing leaks and no label is wrong.
    `documents` and `tokens` of a step of each stage; `reference_loss`: of the reference's last step, in nats. `not_exercised`: what the
    config has that was not computed, a line each."""

    reference: str
    documents: int
    tokens: int
    reference_loss: float
    loss: float
    grad: float
    weight: float
    optimizer: float
    leaked_positions: int
    wrong_labels: int
    tolerance: float
    not_exercised: tuple[str, ...]
    passed: bool = field(metadata={"key": "pass"})
    rows: tuple[CheckedLayout, ...]


@dataclass(frozen=True)
class Exported(Reported):
    """A Hugging Face folder that was written, and the names of its files."""

    folder: Path
    files: tuple[str, ...]


@dataclass(frozen=True)
class PlannedGroup(Reported):
    """The documents of up to `upto` tokens in a mean step: how many, their tokens, the layout and packs that compute them, in seconds."""

    upto: int
    layout: str
    pack: int
    documents: float
    tokens: float
    seconds: float
    tokens_per_s: float


@dataclass(frozen=True)
class PlannedWay(Reported):
    """A way to compute: `layout` as a config's `layout` has it. `seconds` of a mean step, between `least_s` and `most_s`; `bytes` by place,
    of the rank that needs most, at `peak`. Of a rival, `times` as long as the best; of the best, its `groups` and the seconds by lane."""

    layout: Any
    seconds: float
    least_s: float
    most_s: float
    bytes: Mapping[str, int]
    peak: str
    groups: tuple[PlannedGroup, ...] | None = field(default=None, metadata={"absent": True})
    lanes: Mapping[str, float] | None = field(default=None, metadata={"absent": True})
    times: float | None = field(default=None, metadata={"absent": True})


@dataclass(frozen=True)
class PlannedCluster(Reported):
    name: str
    nodes: int
    devices_per_node: int


@dataclass(frozen=True)
class Short(Reported):
    """A way for which `bytes` are lacking at a `place`: the device, or a rank's part of the host's memory or of the disk."""

    way: Any
    bytes: int
    place: str


@dataclass(frozen=True)
class PlannedHome(Reported):
    """Where the training state may lie, and the seconds of a step then; None where nothing fits."""

    home: Any
    seconds: float | None


@dataclass(frozen=True)
class LayoutPlan(Reported):
    """The best layouts for documents on a cluster. `home`: where the training state lies, of the `homes` that were compared. `fits`:
    whether there is a layout; where there is none, `changes` after which there would be, and which ways are `short` of memory. `best`, the
    best `single` layout, the best with `context_parallel` alone, and `rivals`; `tried`: those that `layout: auto` trains some steps
    each, in their order. `candidates` were compared, and `refused` by reason. `mfu` by convention."""

    cluster: PlannedCluster
    ranks: int
    home: Any
    homes: tuple[PlannedHome, ...]
    tokens_per_step: int
    documents: int
    longest: int
    candidates: int
    refused: Mapping[str, int]
    budget_bytes: int
    fits: bool
    changes: tuple[str, ...]
    short: tuple[Short, ...]
    best: PlannedWay | None = field(default=None, metadata={"absent": True})
    mfu: Mapping[str, float] | None = field(default=None, metadata={"absent": True})
    single: PlannedWay | None = None
    context_parallel: PlannedWay | None = None
    tried: tuple[PlannedWay, ...] = ()
    rivals: tuple[PlannedWay, ...] = ()
