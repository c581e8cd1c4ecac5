"""What a rank brings to the programs of its steps: layouts as it sees them, its part of home with
the tier of each unit, and the exchanges of switches."""

from collections.abc import Collection, Sequence
from itertools import pairwise

from longshift.layout.home_tiers import (
    HomeTiers,
    StateBytes,
    early_units,
    tiers_of,
    trained_elements,
)
from longshift.layout.placement import buckets_of, place_of
from longshift.program.exchanges import Exchanges, plan_exchanges
from longshift.program.turns import RankLayout, Visit, visit_of
from longshift.spec.formats import MomentFormat, Wire
from longshift.switch.itinerary import Cut, Itinerary
from longshift.switch.plan import Plan
from longshift.workload.groups import LengthGroup


class RankInputs:
    """What the programs of one rank depend on, beside the visits of a step: its layouts, its part
    of the training state, and the planned switches. Mutable: it keeps exchanges that it has made.
    Several threads may ask for them."""

    def __init__(
        self,
        itinerary: Itinerary,
        rank: int,
        weight_bytes: int,
        sum_bytes: int,
        home_in: HomeTiers = HomeTiers(),  # noqa: B008  (frozen)
        moments: int = 2,
        packed: MomentFormat = "float32",
        wire: Wire = Wire(),  # noqa: B008  (frozen)
        doubled: bool = True,
    ):
        """`home_in`: where the training state lies; `moments`: how many the optimizer keeps,
        `packed` into this format between updates; `wire`: formats of gathers and reductions;
        `doubled`: whether a home on disk has second places."""
        self.itinerary = itinerary
        self.rank = rank
        self.home_in = home_in
        self.wire = wire
        self.moments = moments
        self.packed: MomentFormat = packed if moments else "float32"
        self.late = home_in.updates_late
        self.by_unit = self.late or self.packed != "float32"
        self.buckets = buckets_of(itinerary.spec, itinerary.home, rank)
        self.state_bytes = StateBytes(weight_bytes, sum_bytes, moments, self.packed)
        self.home_tiers = tiers_of(home_in, self.buckets, rank, self.state_bytes)
        self.on_disk = [unit for unit, tier in self.home_tiers.items() if tier == "disk"]
        self.kept = trained_elements(itinerary.spec, self.buckets, rank)
        self.trained = list(self.kept)
        self.mixed = {bucket.unit for bucket in self.buckets if bucket.frozen}.intersection(
            self.trained
        )
        self.early = (
            early_units(self.home_tiers, self.kept)
            if doubled and self.packed == "float32"
            else frozenset[int]()
        )
        # Elements of two units that are updated one after the other.
        early_sizes = [size for unit, size in self.kept.items() if unit in self.early]
        self.early_pair = max((a + b for a, b in pairwise(early_sizes)), default=sum(early_sizes))
        self.bytes = weight_bytes, sum_bytes
        self.views = {
            layout: RankLayout(itinerary.spec, layout, cut, rank)
            for layout, cut in itinerary.cuts.items()
        }
        self.cuts = set(itinerary.cuts.values())
        self.world = itinerary.home.world
        self._exchanges: dict[Plan, Exchanges] = {}

    def visits(
        self, groups: Sequence[LengthGroup], lengths: Sequence[int]
    ) -> tuple[tuple[Visit, ...], list[list[tuple[int, ...]]]]:
        """The groups as a program needs them, and the documents of each micro-batch of this rank's
        replica, by visit. A micro-batch has no documents where the replica has fewer packs than
        another. `lengths`: of the step's documents."""
        visits = []
        packs_by_visit = []
        for group in groups:
            # Replicas run one program, so that one with fewer packs computes empty ones.
            share = group.shares[self.views[group.layout].at.dp]
            num_packs = max(map(len, group.shares))
            packs = [group.packs[number] for number in share] + [()] * (num_packs - len(share))
            pack_lengths = [[lengths[document] for document in pack] for pack in packs]
            visits.append(visit_of(self.itinerary.spec, group.layout, pack_lengths))
            packs_by_visit.append(packs)
        return tuple(visits), packs_by_visit

    def left(self, early: Collection[int] = ()) -> tuple[int, ...]:
        """Units whose updates a step leaves where it has updated some early."""
        return tuple(unit for unit in self.trained if unit not in early) if self.late else ()

    def place(self, unit: int) -> int:
        """Where a unit comes in the forward."""
        return place_of(self.itinerary.spec, unit)

    def exchanges(
        self, plan: Plan, source: Cut | None = None, target: Cut | None = None
    ) -> Exchanges:
        """A plan as the program needs it. `source`: the cut that it leaves; `target`: the cut that
        it fills; None where home does both."""
        if plan in self._exchanges:
            return self._exchanges[plan]
        exchanges = plan_exchanges(
            spec=self.itinerary.spec,
            plan=plan,
            opened_units=self._units_under(target),
            closed_units=self._units_under(source),
            ahead_bytes=self.itinerary.options.ahead_bytes,
        )
        return self._exchanges.setdefault(plan, exchanges)  # another thread may have been first

    def _units_under(self, cut: Cut | None) -> frozenset[int]:
        """The moving units that this rank has under a cut."""
        return next((view.units for view in self.views.values() if view.cut == cut), frozenset())
