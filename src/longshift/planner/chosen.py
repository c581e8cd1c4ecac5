"""Shortlist: what a search in closed form found."""

from collections.abc import Mapping
from dataclasses import dataclass

from longshift.layout.layout import Layout
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

    def __str__(self) -> str:
        return " > ".join(f"{group.layout} <= {group.upto}" for group in self.groups)


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
    """What a search found. `best` None: nothing fits; `others`: the next best. `binding`: what the choice is bound by; `changes`: the
    smallest that would make something fit, first the one that costs least."""

    devices: int
    max_len: int
    budget_bytes: float
    candidates: int
    refused: Mapping[str, int]
    best: Answer | None = None
    single: Answer | None = None
    context_parallel: Answer | None = None
    others: tuple[Answer, ...] = ()
    rivals: tuple[Rival, ...] = ()
    binding: str = ""
    changes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.best is not None
