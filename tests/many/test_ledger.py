"""The ledger's bytes against those of torch's tensors in ranks, and the bytes that ranks send; and the power of the comparison."""

from collections.abc import Callable

import caches
import pytest
from forked import DEADLINE_S, Worlds
from ledger import QUICK, Case, rows_of, wrong

from longshift.weigh.allocations import RankMemory
from longshift.weigh.ledger import Ledger
from longshift.weigh.recorder import RecordedGroup


@pytest.fixture(scope="module")
def measured(worlds: Worlds) -> Callable[[Case], list[dict]]:
    """measured(case): what its ranks counted, once."""
    known = dict[Case, list[dict]]()

    def ask(case: Case) -> list[dict]:
        if case not in known:
            known[case] = worlds(case.world).call("ledger_ranks:weigh", DEADLINE_S, trial=case.trial.to_json(), layout=case.layout)
        return known[case]

    return ask


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_a_step_holds_and_sends_what_the_ledger_says(measured: Callable, case: Case):
    assert not wrong(rows_of(case, measured(case)))


def forgotten(*names: str, share: float = 0.0) -> Callable[[pytest.MonkeyPatch], None]:
    """Of buffers with these names the ledger counts a share only."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        native = RankMemory.allocate

        def held(self: RankMemory, name: str, size: int, *place, **shape):
            return native(self, name, int(size * share) if name.startswith(names) else size, *place, **shape)

        patch.setattr(RankMemory, "allocate", held)

    return apply


def dropped(kind: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The ledger does not play operations of a kind."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        native = Ledger.__init__

        def init(self: Ledger, *how, **more):
            native(self, *how, **more)
            self.table[kind] = lambda op: None

        patch.setattr(Ledger, "__init__", init)

    return apply


def own_part_sent(patch: pytest.MonkeyPatch) -> None:
    """Gathers and reductions send a rank's own part to itself, too."""
    native = RankMemory.send
    patch.setattr(RankMemory, "send", lambda account, what, size: native(account, what, size * 2 if what in ("gather", "reduce") else size))


def nothing_inside(patch: pytest.MonkeyPatch) -> None:
    """Operations need nothing but what they leave."""
    patch.setattr(RankMemory, "record_profile", lambda memory, profile: [memory.send(axis, size) for axis, size in profile.sent.items()])


def attention_sends_twice(patch: pytest.MonkeyPatch) -> None:
    send = RecordedGroup._send
    patch.setattr(RecordedGroup, "_send", lambda group, elements, x: send(group, 2 * elements, x))


MUTANTS = {
    "reductions are counted half": (forgotten("reductions under way", share=0.5), "dp2.z3"),
    "fused buffers of gathers are forgotten": (forgotten("gathers under way"), "dp2.z3"),
    "gradient sums are forgotten": (forgotten("gradient sums", "gradients at home"), "dp1"),
    "moments are one": (forgotten("moments", share=0.5), "dp1"),
    "scales are sent twice": (lambda patch: sent_twice(patch, "scales"), "tp2, float8"),
    "moments are not packed": (dropped("pack"), "tp2, float8"),
    "unpacked moments are forgotten": (forgotten("unpacked moments"), "tp2, float8"),
    "buffers of the disk are forgotten": (forgotten("buffers of the disk"), "dp2.z3 > tp2"),
    "copies of a layout are forgotten": (forgotten("working copies"), "dp2 > tp2 > pp2"),
    "the stream that waits is forgotten": (forgotten("residual stream"), "ring2.z1.recompute-full.disk"),
    "graphs are forgotten": (forgotten("activations for the backward"), "recompute-selective"),
    "keys and values are forgotten": (forgotten("keys and values"), "u2.chunk256.disk"),
    "what was fetched is forgotten": (forgotten("fetched from a tier"), "chunk256.disk.kv-offload"),
    "messages are forgotten": (forgotten("messages between stages"), "pp2.v2"),
    "nothing is needed inside": (nothing_inside, "tp2"),
    "own parts are sent": (own_part_sent, "dp2.z3"),
    "attention sends twice": (attention_sends_twice, "ring2.z1.recompute-full.disk"),
    "sums of a guest are sent twice": (lambda patch: sent_twice(patch, "sums"), "dp2.z2 > tp2"),
    "messages are sent twice": (lambda patch: sent_twice(patch, "rising"), "pp2.v2"),
    **{
        f"{kind} is not played": (dropped(kind), layout)
        for kind, layout in (
            ("release", "dp2.z3"),
            ("accumulate", "dp1"),
            ("reduce", "dp3.z2"),
            ("unload", "recompute-full"),
            ("update", "dp1"),
            ("close", "dp2 > tp2 > pp2"),
            ("open", "dp2 > tp2 > pp2"),
            ("exchange", "dp2 > tp2 > pp2"),
            ("drop", "ring2.z1.recompute-full.disk"),
            ("await send", "pp2.v2"),
        )
    },
}


def sent_twice(patch: pytest.MonkeyPatch, communicator: str) -> None:
    native = RankMemory.send
    patch.setattr(RankMemory, "send", lambda account, what, size: native(account, what, size * 2 if what == communicator else size))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_ledger_is_noticed(measured: Callable, mutant: str, monkeypatch: pytest.MonkeyPatch):
    apply, layout = MUTANTS[mutant]
    case = next(case for case in QUICK if layout in (case.layout, f"{case.layout}, {case.packed}"))
    answers = measured(case)
    apply(monkeypatch)
    caches.clear()
    try:
        found = wrong(rows_of(case, answers))
    except (KeyError, IndexError, AssertionError):  # the ledger misses what it needs
        found = [mutant]
    monkeypatch.undo()
    caches.clear()
    assert found
