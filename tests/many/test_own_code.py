"""A loss and an optimizer rule of the user's own train as one process does, under every layout, from every home; the ledger's peak is a
bound; what would not be the same training is refused when a run starts.

The losses and rules are the examples of docs/extending.md, read from the page.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from forked import DEADLINE_S, Truth, Worlds
from ledger import Case, rows_of, wrong
from parity import EDGES, FAMILIES, KINDS, LIMIT, largest, packed_trial, staged, trial_of
from test_home_tiers import CLIPS
from test_parity import switched_trial
from trial import Trial

from longshift.errors import UsageError
from longshift.layout.layout import Layout
from longshift.model.decoder import Ops
from longshift.model.functions import WRITTEN_OUT
from longshift.model.loss import IGNORE, token_loss
from longshift.simulate.turn_calls import TurnKind, turn_calls
from longshift.spec.rule import Rule
from longshift.state.user_rule import checked_rule, update_in_pieces

STEPS = 4


def losing(trial: Trial, loss: str) -> Trial:
    """The trial with a loss of own_code."""
    return replace(trial, spec=replace(trial.spec, loss=f"own_code:{loss}"))


def own_rule(name: str, moments: tuple[str, ...]) -> Rule:
    return Rule(f"own_code:{name}", moment_names=moments)


LION = own_rule("Lion", ("momentum",))
ADAMW = own_rule("AdamW", ("exp_avg", "exp_avg_sq"))


def differences(worlds: Worlds, trial: Trial, layout: str, path: str) -> dict[str, float]:
    size = Layout.parse(layout.split(" > ")[0]).world
    answers = worlds(size).call("trial:compare", DEADLINE_S, trial=trial.to_json(), layout=layout, path=path, per_node=2)
    return {kind: largest(answer[kind] for answer in answers) for kind in KINDS}


# A loss


@pytest.mark.parametrize(
    ("loss", "family", "layout"),
    [
        ("z_loss", "llama", "tp2.z2"),  # 257 rows of the vocabulary: 129 and 128
        ("label_smoothing", "gemma2", "tp4"),  # logits are capped, and tied to the embedding
        ("z_loss", "masked", "dp2.z3"),
        ("label_smoothing", "rows", "u2.tp2.recompute-full"),
        ("z_loss", "lora", "pp2.tp2"),
        ("label_smoothing", "llama-tied", "pp2.chunk13.host"),
        ("z_loss", "masked", "ring2.tp2.chunk16.host.kv-offload"),
        ("entropy_where_finite", "masked", "dp2"),
    ],
)
def test_a_loss_is_one_process(worlds: Worlds, truth: Truth, loss: str, family: str, layout: str):
    trial = losing(trial_of(family, STEPS), loss)
    if loss == "entropy_where_finite":  # the reference sees target tokens alone; none has label 0
        trial = replace(trial, seed=1)
    found = differences(worlds, trial, layout, truth(trial))
    assert all(found[kind] <= LIMIT for kind in KINDS), found


@pytest.mark.parametrize(
    ("loss", "groups"), [("z_loss", "dp2 > u2 > tp2.z2"), ("label_smoothing", "dp4.z3 > dp2.tp2 > u2.tp2.chunk13.host")]
)
def test_a_step_that_switches_with_a_loss_is_one_process(worlds: Worlds, truth: Truth, loss: str, groups: str):
    trial = losing(switched_trial("llama", edges=EDGES, bucket_bytes=20_000), loss)
    found = differences(worlds, trial, groups, truth(losing(switched_trial("llama"), loss)))
    assert all(found[kind] <= LIMIT for kind in KINDS), found


def test_a_loss_is_another_training_than_cross_entropy(worlds: Worlds, truth: Truth):
    trial = trial_of("llama", STEPS)
    found = differences(worlds, losing(trial, "z_loss"), "dp1", truth(trial))
    assert found["loss"] > 1e-4
    assert found["grad"] > 1e-4


@dataclass(frozen=True)
class LossCase(Case):
    """A step with a loss of own_code, whose tensors are the most that it holds."""

    loss: str = "z_loss"

    @property
    def trial(self) -> Trial:
        return losing(super().trial, self.loss)


@pytest.mark.parametrize(
    "case",
    [
        LossCase("dp1.recompute-full"),
        LossCase("dp1.recompute-full", precision="bf16", loss="label_smoothing"),
        LossCase("tp2.recompute-full", precision="bf16"),
    ],
    ids=lambda case: f"{case.loss} {case}",
)
def test_ledger_bounds_a_step_with_a_loss(worlds: Worlds, case: LossCase):
    measured = worlds(case.world).call("ledger_ranks:weigh", DEADLINE_S, trial=case.trial.to_json(), layout=case.layout)
    rows = rows_of(case, measured)
    assert not wrong(rows)
    plain = Case(case.layout, precision=case.precision)
    cross_entropy = rows_of(
        plain, worlds(case.world).call("ledger_ranks:weigh", DEADLINE_S, trial=plain.trial.to_json(), layout=plain.layout)
    )
    assert rows[0]["measured"] > 1.2 * cross_entropy[0]["measured"]


def test_z_loss_and_its_gradient_are_those_of_plain_torch():
    spec = replace(FAMILIES["llama"], loss="own_code:z_loss")
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(31, spec.vocab, generator=generator, dtype=torch.float64)
    labels = torch.randint(spec.vocab, (31,), generator=generator)
    labels[3:7] = IGNORE
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = Ops(spec).loss(ours, labels, WRITTEN_OUT)
    (0.25 * loss).backward()
    z = plain[labels != IGNORE].exp().sum(-1).log()
    true_loss = F.cross_entropy(plain, labels, ignore_index=IGNORE, reduction="sum") + 1e-4 * (z**2).sum()
    (0.25 * true_loss).backward()
    assert ours.grad is not None
    assert plain.grad is not None
    assert float(loss.detach()) == pytest.approx(float(true_loss.detach()), rel=1e-14)
    assert float((ours.grad - plain.grad).norm() / plain.grad.norm()) < 1e-14
    assert not ours.grad[3:7].any()


def test_a_gradient_that_is_one_number_is_masked():
    spec = replace(FAMILIES["llama"], loss="own_code:linear")
    logits = torch.zeros(3, spec.vocab).requires_grad_()
    Ops(spec).loss(logits, torch.tensor([5, IGNORE, 0]), WRITTEN_OUT).backward()
    assert logits.grad is not None
    assert logits.grad[:, 0].tolist() == [1.0, 0.0, 1.0]


def test_clock_counts_what_a_loss_gathers():
    """Ranks of two and four that cut 257 rows of the vocabulary gather them, filled up, in bf16: 2 * 129 and 4 * 65 columns of a token."""
    for ranks, columns in ((2, 2 * 129), (4, 4 * 65)):
        spec = replace(FAMILIES["llama"], loss="own_code:z_loss")
        kind = TurnKind(spec, Layout(tp=ranks).mesh, "head", "embed", "pass", False, 2, "nccl", False, False)
        own, built_in = turn_calls(kind), turn_calls(kind._replace(spec=FAMILIES["llama"]))
        number, *by_degree = own.collectives["tp", "all_gather"] - built_in.collectives["tp", "all_gather"]
        assert (number, *by_degree) == (1.0, 0.0, 2.0 * columns, 0.0)
        assert ("tp", "all_reduce") not in own.collectives
        assert own.pass_bytes[1] > built_in.pass_bytes[1]


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        ("mean", r"returns shape \[\] for 8 tokens; return the loss of each, neither sum nor mean"),
        ("broken", r"fails on random logits \[8, 61\]: ValueError: no such row \(.*own_code.py, line \d+\)$"),
        ("half", "returns torch.float32 for logits of torch.float64; leave the format as it is"),
        ("in_place", "changes its logits in place; compute on a copy"),
        ("centred", "is no sum over tokens: the loss of a token differs by"),
        ("by_position", "is no sum over tokens: the loss of a token differs by"),
        ("random", "is no sum over tokens: the loss of a token differs by"),
        ("asking", r"cannot be played on tensors without values.*may not ask for values \(.item\(\)"),
        ("detached", "returns losses that have no gradient"),
        ("text", "returns str, and a tensor with the loss of each token is needed"),
        ("number", "is no function of logits and labels"),
    ],
)
def test_a_loss_that_would_not_be_the_same_training_is_refused(loss: str, told: str):
    with pytest.raises(UsageError, match=f"^train.loss: own_code:{loss} {told}"):
        token_loss(f"own_code:{loss}", 61)


# An optimizer rule


@pytest.mark.parametrize(
    ("family", "layout", "home"),
    [
        ("llama", "dp2.z0", "device"),
        ("llama-tied", "dp2.z1", "host"),
        ("llama", "dp2.tp2.z3", "disk"),
        ("lora", "dp4.z2", "disk"),
        ("masked", "u2.z2.chunk13.host", "host"),
        ("llama", "dp2.z3 > u2 > tp2.chunk13.host", "disk"),
        ("llama", "dp4 > dp2.tp2.z3 > pp2.u2", "host"),
    ],
)
def test_lion_is_one_process(worlds: Worlds, truth: Truth, family: str, layout: str, home: str):
    """The clip is active in every step but for the home on disk, which makes updates before the norm."""
    trial = replace(trial_of(family, STEPS), rule=LION, lr=1e-3)
    trial = replace(trial, clip=None) if home == "disk" else trial
    groups = layout.count(" > ")
    found = differences(worlds, replace(trial, home=home, edges=EDGES[:groups]), layout, truth(trial))
    assert all(found[kind] <= LIMIT for kind in KINDS), found


@pytest.mark.parametrize(("layout", "home"), [("dp2.z2", "device"), ("dp2 > u2 > tp2", "disk"), ("u2.chunk13.host", "host")])
def test_adamw_as_a_rule_is_the_built_in(worlds: Worlds, truth: Truth, layout: str, home: str):
    """The clip is active in every step but for the home on disk, which makes updates before the norm."""
    trial = trial_of("llama", 20, **({"clip": None} if home == "disk" else {}))
    own = replace(trial, rule=ADAMW, home=home, edges=EDGES[: layout.count(" > ")])
    found = differences(worlds, own, layout, truth(trial))
    assert all(found[kind] <= LIMIT for kind in KINDS), found


def test_lion_goes_on_from_a_checkpoint_in_another_layout(worlds: Worlds, truth: Truth):
    """Three stages: each begins with the checkpoint of the one before it, in other layouts, the second and third with a home on disk."""
    trial = replace(staged("llama", 6), rule=LION, lr=1e-3)
    answers = worlds(2).call(
        "trial:compare",
        DEADLINE_S,
        trial=replace(trial, home="disk").to_json(),
        layout="dp2.z3 | tp2 | dp2.z1 > pp2 > u2.chunk13.disk",
        path=truth(trial),
        per_node=2,
    )
    found = {kind: largest(answer[kind] for answer in answers) for kind in KINDS}
    assert all(found[kind] <= LIMIT for kind in KINDS), found


def test_a_rule_takes_clipped_gradients_in_float32(worlds: Worlds, truth: Truth):
    """torch's kernels apply the clip's factor themselves; a rule is given the product."""
    trial = trial_of("llama", STEPS, precision="float32", rule=ADAMW)
    found = differences(worlds, trial, "dp2.z2", truth(trial))
    assert found["optimizer"] < 1e-4, found


@pytest.mark.parametrize("layout", ["dp2.z3", "dp2.z2 > u2.chunk16.disk"])
def test_where_home_of_a_rule_lies_moves_no_bit(worlds: Worlds, layout: str):
    """With updates before the norm, of which some are taken back."""
    trial = trial_of("llama", len(CLIPS), precision="float32", rule=ADAMW, edges=EDGES[: layout.count(" > ")])
    found = {}
    for home in ("device", "host", "disk"):
        what = replace(trial, home=home).to_json()
        found[home] = worlds(2).call("test_home_tiers:alternating", DEADLINE_S, layout=layout, trial=what)
    assert any(any(rank["early"]) for rank in found["disk"])
    for home in ("host", "disk"):
        assert [rank["bits"] for rank in found[home]] == [rank["bits"] for rank in found["device"]]


def test_a_rule_with_packed_moments_has_the_same_bits_in_every_layout(worlds: Worlds, tmp_path: Path):
    bits = []
    for layout, home in (("dp1", "device"), ("dp2.z3", "disk"), ("tp2 > dp2.z1", "host")):
        trial = replace(packed_trial(layout, "bf16", home), rule=LION, lr=1e-3)
        folder = tmp_path / str(len(bits))
        folder.mkdir()
        world = worlds(Layout.parse(layout.split(" > ")[0]).world)
        [of_rank, *_] = world.call("home_ranks:logical_bits", DEADLINE_S, trial=trial.to_json(), layout=layout, folder=str(folder))
        bits.append(of_rank)
    assert bits[1] == bits[0]
    assert bits[2] == bits[0]


def test_lion_is_its_formula():
    """Two steps of one weight of 1, gradients 0.5 and -4, rate 0.1, decay 0.2: w = 0.98 - 0.1, m = 0.005; then the direction is
    0.9 * 0.005 - 0.1 * 4 < 0: w = 0.98 * 0.88 + 0.1, m = 0.99 * 0.005 - 0.01 * 4."""
    weight, momentum = torch.tensor([1.0]).double(), torch.tensor([0.0]).double()
    rule = checked_rule("own_code:Lion")
    for step, gradient in enumerate((0.5, -4.0), 1):
        update_in_pieces(rule, weight, torch.tensor([gradient]).double(), {"momentum": momentum}, step, 0.1, 0.2)
    assert float(weight) == pytest.approx(0.98 * 0.88 + 0.1, rel=1e-14)
    assert float(momentum) == pytest.approx(0.99 * 0.005 - 0.04, rel=1e-12)


def test_vectors_are_updated_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("longshift.state.user_rule.PIECE", 5)
    rule = checked_rule("own_code:AdamW")
    lengths = []
    whole, cut = (tuple(torch.ones(13).double() for _ in range(3)) for _ in range(2))
    gradient = torch.linspace(-1, 1, 13).double()
    rule.update(whole[0], gradient, {"exp_avg": whole[1], "exp_avg_sq": whole[2]}, 3, 0.1, 0.2)
    native = type(rule).update
    monkeypatch.setattr(type(rule), "update", lambda rule, weight, *more: (lengths.append(len(weight)), native(rule, weight, *more)))
    update_in_pieces(rule, cut[0], gradient, {"exp_avg": cut[1], "exp_avg_sq": cut[2]}, 3, 0.1, 0.2)
    assert lengths == [5, 5, 3]
    assert all(torch.allclose(a, b, rtol=1e-15) for a, b in zip(whole, cut))


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("Trust", "is not elementwise: parts of a vector are updated otherwise than the whole"),
        ("Neighbor", "is not elementwise: parts of a vector"),
        ("Remembers", "remembers something outside its moments, or draws random numbers"),
        ("Resets", "remembers something outside its moments: vectors that are updated in turn differ"),
        ("Draws", "remembers something outside its moments, or draws random numbers"),
        ("Clips", "changes the gradient, which an update may need again"),
        ("Rebinds", "puts other tensors into its moments: change them in place"),
        ("Functional", "does not change the weight: update it in place"),
        ("Broken", r"fails on random vectors of 64 elements: ValueError: no such vector \(.*own_code.py, line \d+\)$"),
        ("Needs", "is a class that cannot be made without arguments"),
        ("Master", "needs moments: a tuple of the names"),
        ("Text", "needs moments: a tuple of the names"),
        ("Still", "has no method update"),
    ],
)
def test_a_rule_that_would_not_be_the_same_training_is_refused(rule: str, told: str):
    with pytest.raises(UsageError, match=f"^train.optimizer: own_code:{rule} {told}"):
        checked_rule(f"own_code:{rule}")


@pytest.mark.parametrize(("key", "load"), [("train.loss", lambda text: token_loss(text, 61)), ("train.optimizer", checked_rule)])
def test_a_name_that_a_module_does_not_have_is_refused(key: str, load):
    with pytest.raises(UsageError, match=f"^{key}: own_code:missing: own_code has no missing"):
        load("own_code:missing")


def test_examples_are_accepted():
    assert checked_rule("own_code:slow_lion").beta1 == 0.95
    assert token_loss("own_code:label_smoothing", 61).text == "own_code:label_smoothing"
