"""What a checkpoint says of the run that wrote it, and whether a config can go on from there."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError

from longshift.config import Config
from longshift.errors import CheckpointError, UsageError
from longshift.model.kernels import Kernel
from longshift.spec.formats import MomentFormat, PrecisionName
from longshift.spec.model import ModelSpec, Rope
from longshift.spec.rule import Rule
from longshift.state.checkpoint import Checkpoint
from longshift.state.manifest import TYPES
from longshift.state.moments import saved_moments
from longshift.state.precision import Precision
from longshift.step.update import State

Count = Annotated[int, Field(ge=0)]
MENDS = {
    "tokenizer": "put the old tokenizer back, or start a new run from an export of this one",
    "data": (
        "put back data.train, data.max_len, data.overlong and train.seed, or start a new run from"
        " an export of this one; mixtures of earlier versions had another order"
    ),
}


class FactsPart(BaseModel):
    """A part of what a checkpoint says. Frozen; what it does not know is passed over."""

    model_config = ConfigDict(frozen=True)


class ChosenKernel(FactsPart):
    """The attention kernel of a run, and whether equal inputs give it equal bits."""

    kernel: str
    deterministic: bool

    @classmethod
    def of(cls, kernel: Kernel, device: torch.device) -> "ChosenKernel":
        return cls(kernel=kernel.name, deterministic=kernel.deterministic(device))

    def __str__(self) -> str:
        return f"{self.kernel} ({'' if self.deterministic else 'not '}deterministic)"


class Fingerprints(FactsPart):
    tokenizer: str
    data: str


def _of_config(*keys: str) -> AliasPath:
    return AliasPath("config", *keys)


class Facts(FactsPart):
    """Where the data goes on, how many updates were made, and of which model, in which format, from
    what and by which kernel the state is. `precision`, `optimizer`, `momentum`: as in
    `train_config.TrainConfig`; `moment_names`: of a rule of the user's own, whose code need not be
    here; `packed`: the format of moments. `attention` is None in checkpoints from before it was
    kept; `base`: of `state.initial_weights.fingerprint`, None where all weights are trained."""

    cursor: Count
    updates: Count
    loss_scale: tuple[float, int] | None
    model: dict[str, Any]
    precision: PrecisionName = Field(validation_alias=_of_config("train", "precision"))
    optimizer: str = Field("adamw", validation_alias=_of_config("train", "optimizer"))
    momentum: float | None = Field(None, validation_alias=_of_config("train", "momentum"))
    moment_names: tuple[str, ...] = Field((), validation_alias=_of_config("train", "moments"))
    packed: MomentFormat = Field("float32", validation_alias=_of_config("home", "moments"))
    fingerprints: Fingerprints
    attention: ChosenKernel | None = None
    base: int | None = None

    @property
    def rule(self) -> Rule:
        rule = Rule(self.optimizer, moment_names=self.moment_names)
        return rule if self.momentum is None else replace(rule, momentum=self.momentum)

    @property
    def home(self) -> torch.dtype:
        """The type of masters."""
        return Precision.of(self.precision).home

    @property
    def moments(self) -> dict[str, torch.dtype]:
        """Kinds of vectors that moments are kept as, and their types."""
        return saved_moments(self.rule.moments, self.packed, self.home)

    @classmethod
    def of(cls, saved: Checkpoint) -> "Facts":
        """The facts of a checkpoint. Raises CheckpointError where one is missing or malformed, or
        where tensors have another dtype."""
        try:
            facts = cls.model_validate(saved.facts)
        except ValidationError as fault:
            first = fault.errors()[0]
            where = ".".join(map(str, ("facts", *first["loc"])))
            raise CheckpointError(
                f"{saved.folder}/manifest.json is malformed: {where}: {first['msg']}"
            ) from None
        kept = {"master": facts.home} | facts.moments
        for kind, found in saved.types.items():
            if found != {TYPES.get(kept[kind]) if kind in kept else None}:
                settings = f"train.precision={facts.precision} and home.moments={facts.packed}"
                raise CheckpointError(
                    f"{saved.folder} holds {kind} as {', '.join(sorted(found))}, which {settings}"
                    f" do not keep. {saved.older}"
                )
        return facts


def facts_of(
    config: Config, state: State, fingerprints: Fingerprints, attention: ChosenKernel, loss: float
) -> dict[str, Any]:
    """What a checkpoint says of its run, as `Facts` are read from it. `loss`: of the last step."""
    values = config.model_dump(mode="json")
    values["train"] |= {"moments": config.train.rule.moment_names}
    return {
        "cursor": state.cursor,
        "updates": state.optimizer.steps,
        "loss_scale": (state.scale.scale, state.scale.good_steps) if state.scale else None,
        "layout": " > ".join(str(edge.use) for edge in config.edges),
        "model": asdict(config.spec),
        "config": values,
        "fingerprints": fingerprints.model_dump(),
        "attention": attention.model_dump(),
        "base": state.base,
        "loss": loss if math.isfinite(loss) else None,  # of a step that fp16 has skipped
        "torch": torch.__version__,
    }


def changed_kernel(facts: Facts | None, attention: ChosenKernel) -> str | None:
    """A warning where a run goes on with another attention kernel than its checkpoint was computed
    by, else None."""
    if facts is None or facts.attention is None or facts.attention == attention:
        return None
    return (
        f"attention was by {facts.attention} and goes on by {attention}: numbers may differ in"
        " their last bits from a run that kept it"
    )


def changed_moments(facts: Facts | None, config: Config) -> str | None:
    """A word about a run that goes on with moments in another format than its checkpoint holds,
    else None."""
    now = config.home.moments
    saved = facts.packed if facts else now
    if saved == now or not config.train.rule.moments:
        return None
    return (
        f"moments were {saved} and go on as {now}: they are converted, rounded once where {now} has"
        " fewer bits"
    )


def changed_model(saved: Mapping[str, Any], spec: ModelSpec) -> list[tuple[str, Any, Any]]:
    """Fields of the model in which `spec` is not what a checkpoint says, with both values. A field
    that is younger than the checkpoint had its default."""
    now = json.loads(json.dumps(asdict(spec)))
    before: dict[str, Any] = {field.name: field.default for field in fields(spec)}
    # Defaults that are tuples are lists in JSON.
    before |= {"full_blocks": [], "freeze": []}
    before |= saved
    for name in ("rope", "window_rope"):
        if isinstance(before[name], Mapping):
            before[name] = asdict(Rope()) | dict(before[name])
    return [(name, was, now.get(name)) for name, was in before.items() if now.get(name) != was]


def expect(
    facts: Facts, config: Config, fingerprints: Fingerprints, run: Path, saved: Checkpoint
) -> None:
    """Refuse to go on from a checkpoint with another model, format, optimizer, data or tokenizer. A
    checkpoint can be resumed only with the same model function, the same moments and the same home
    precision; its cursor counts documents of its data, and its embedding has rows of its tokenizer.
    Raises CheckpointError, UsageError."""
    for field, was, now in changed_model(facts.model, config.spec):
        raise CheckpointError(
            f"the model changed since {saved.folder} was written: {field} was {was} and is {now}; "
            "put the old model back, or start a new run from an export of this one"
        )
    # Steps may be computed in another format, but the masters keep theirs.
    precision = config.train.precision
    home = Precision.of(precision).home
    if facts.home != home:
        raise CheckpointError(
            f"{saved.folder} keeps its state in {facts.home}, train.precision={precision} in"
            f" {home}: write train.precision={facts.precision}, or start a new run from an export"
            " of this one"
        )
    saved_rule = facts.rule
    rule = config.train.rule
    if saved_rule.moments != rule.moments:
        settings = f"train.optimizer={saved_rule.name}"
        if saved_rule.name == "sgd":
            settings += f" train.momentum={saved_rule.momentum:g}"
        raise CheckpointError(
            f"{saved.folder} has the moments of {saved_rule}, and {rule} keeps others: write"
            f" {settings}, or start a new run from an export of this one"
        )
    for source, mend in MENDS.items():
        if getattr(facts.fingerprints, source) != getattr(fingerprints, source):
            raise CheckpointError(f"the {source} changed since {saved.folder} was written: {mend}")
    saved.expect(config.spec, tuple(facts.moments))
    if saved.step > config.train.steps:
        raise UsageError(
            f"{run} is at step {saved.step} already: train.steps={config.train.steps} cannot be"
            " reached; write a larger one"
        )
