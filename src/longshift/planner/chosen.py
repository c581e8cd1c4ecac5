"""Shortlist: what a search found, as a value that says itself in lines and as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from longshift.layout.layout import Layout, format_size
from longshift.workload.groups import Edge

GIB = 2**30


@dataclass(frozen=True)
class Chosen:
    """A group of documents of up to `upto` tokens, under `layout` in packs of up to `pack` tokens. `documents`, `tokens`: shares of all;
    `seconds`: of a step, 0 to it where a step has none; bytes at the most on one device, host and disk."""

    upto: int
    layout: str
    pack: int
    documents: float
    tokens: float
    seconds: float
    tokens_per_s: float
    device_bytes: float
    host_bytes: float = 0.0
    disk_bytes: float = 0.0


@dataclass(frozen=True)
class Answer:
    """Groups, and seconds of a step with them."""

    groups: tuple[Chosen, ...]
    seconds: float
    switch_seconds: float = 0.0

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The groups as a run takes them."""
        return tuple(Edge(group.upto, Layout.parse(group.layout), group.pack) for group in self.groups)

    @property
    def text(self) -> str:
        """`8K: dp2.tp4, 32K: tp8`, or the layout alone where there is one."""
        if len(self.groups) == 1:
            return self.groups[0].layout
        return ", ".join(f"{format_size(group.upto)}: {group.layout}" for group in self.groups)


@dataclass(frozen=True)
class Rival:
    """A layout that was not taken: what it would cost. `slower`: share of the best single layout's seconds; `short_bytes`: above the memory
    of a device for packs of the longest documents, 0 where it fits."""

    layout: str
    slower: float
    short_bytes: float

    def __str__(self) -> str:
        if self.short_bytes > 0:
            return f"{self.layout}: {self.short_bytes / GIB:.1f} GiB short"
        return f"{self.layout}: {self.slower:+.1%}"


@dataclass(frozen=True)
class Shortlist:
    """What a search found. `best` None: nothing fits; `others`: the next best. `mfu`: by convention; `band`: relative half-width of the
    seconds; `binding`: what the choice is bound by; `changes`: the smallest that would make something fit, first the one that costs
    least."""

    devices: int
    max_len: int
    budget_bytes: float
    candidates: int
    refused: Mapping[str, int]
    best: Answer | None = None
    single: Answer | None = None
    context_parallel: Answer | None = None
    others: tuple[Answer, ...] = ()
    band: float = 0.0
    mfu: Mapping[str, float] = field(default_factory=dict)
    rivals: tuple[Rival, ...] = ()
    binding: str = ""
    changes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.best is not None

    def to_json(self) -> dict:
        """The choice as JSON values."""
        return {**asdict(self), "fits": self.fits, "rivals": [{**asdict(rival), "text": str(rival)} for rival in self.rivals]}

    def __str__(self) -> str:
        lines = []
        if self.best is None:
            lines += [f"nothing fits: {self.binding}", *(f"  {change}" for change in self.changes)]
        else:
            lines += ["upto     documents  tokens  pack     seconds  tokens/s    GiB  layout"]
            for group in self.best.groups:
                share, size = f"{group.documents:8.2%}  {group.tokens:6.1%}", f"{format_size(group.pack):>7}"
                speed = f"{group.seconds:8.3f}  {group.tokens_per_s:8.0f}  {group.device_bytes / GIB:5.1f}"
                lines.append(f"{format_size(group.upto):<7}  {share}  {size}  {speed}  {group.layout}")
            low, high = (self.best.seconds * (1 + way * self.band) for way in (-1, 1))
            shown = ", ".join(f"{name} {value:.1%}" for name, value in self.mfu.items())
            lines.append(
                f"step {self.best.seconds:.3f} s ({low:.3f} to {high:.3f}), switches {self.best.switch_seconds:.3f} s; MFU {shown}"
            )
            lines.append(self.binding)
            for name, answer in (("best single layout", self.single), ("context parallelism only", self.context_parallel)):
                if answer is not None:
                    lines.append(f"{name}: {answer.seconds:.3f} s ({answer.seconds / self.best.seconds:.3f} times)  {answer.text}")
            lines += [f"  {rival}" for rival in self.rivals]
        lines += [f"{self.candidates} candidates"] + [f"  {count} refused: {reason}" for reason, count in self.refused.items()]
        return "\n".join(lines)
