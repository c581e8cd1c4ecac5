"""The `train` section of a config: steps, the optimizer, and the stages of a run."""

from collections.abc import Mapping
from typing import Annotated, Any, Required

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
    with_config,
)
from typing_extensions import TypedDict

from longshift.config_parts import (
    Count,
    Decay,
    Layouts,
    LongestDocument,
    Number,
    ObjectText,
    Rate,
    RopeConfig,
    Seconds,
    Section,
    Size,
    TrainSources,
    name_or_object,
)
from longshift.layout.auto_layout import AutoLayout
from longshift.spec.formats import PrecisionName
from longshift.spec.model import CROSS_ENTROPY
from longshift.spec.rule import OPTIMIZERS, Rule, load_rule
from longshift.workload.lengths import Overlong

LEAST_LR = 0.1  # of lr, where min_lr is not given
PositiveRate = Annotated[Rate, Field(gt=0)]
SmallestRate = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, lt=1)]
LossName = Annotated[str, name_or_object(CROSS_ENTROPY)]
OptimizerName = Annotated[str, name_or_object(*OPTIMIZERS)]


StageConfig = TypedDict(
    "StageConfig",
    {
        "steps": Required[Size],
        "data.max_len": LongestDocument,
        "data.train": TrainSources,
        "data.overlong": Overlong,
        "train.tokens_per_step": Size,
        "layout": Layouts,
        "model.rope": RopeConfig,
        "train.lr": PositiveRate,
        "train.min_lr": SmallestRate,
        "train.warmup": Count,
        "train.schedule": Decay,
    },
    total=False,
)
"""A part of a run: its steps, and the run's keys that have another value in it. With `train.lr`, a
stage has a schedule of its own, over its own steps; without it, the run's goes on."""
with_config(ConfigDict(extra="forbid", allow_inf_nan=False))(StageConfig)


def _check_stage(stage: StageConfig) -> StageConfig:
    if "train.lr" not in stage and any(
        f"train.{name}" in stage for name in ("min_lr", "warmup", "schedule")
    ):
        raise ValueError(
            "train.min_lr, warmup and schedule are of a stage that has train.lr; without it the"
            " run's schedule goes on"
        )
    if isinstance(stage.get("layout"), AutoLayout):
        raise ValueError(
            "layout: auto is chosen for a whole run; name the layout of a stage (longshift plan"
            " finds it)"
        )
    return stage


Stages = tuple[Annotated[StageConfig, AfterValidator(_check_stage)], ...]


def default_min_lr(train: Mapping[str, Any]) -> float:
    """Where the section gives none."""
    return LEAST_LR * train.get("lr", 0.0)


class TrainConfig(Section):
    """Steps and the optimizer."""

    tokens_per_step: Size = Field(
        description=(
            "a step takes whole documents until it has this many tokens, whatever the layout"
        )
    )
    stages: Stages = Field(
        (), description="parts of the run, in order, whose steps add up to steps"
    )
    steps: Size = Field(
        default_factory=lambda data: sum(stage["steps"] for stage in data["stages"]),
        description="optimizer updates of the run; those of its stages where it is not given",
    )
    lr: PositiveRate = Field(description="the highest learning rate")
    min_lr: SmallestRate = Field(
        default_factory=default_min_lr,
        description="the learning rate at the end; a tenth of lr where it is null or not given",
    )
    warmup: Count = Field(0, description="steps in which the learning rate rises to lr")
    schedule: Decay = Field(
        "cosine", description="how the learning rate falls from lr to min_lr; constant stays at lr"
    )
    clip: Annotated[Number, Field(gt=0)] | None = Field(
        1.0, description="largest global gradient norm; null leaves it alone"
    )
    precision: PrecisionName = Field(
        "bf16", description="format that a step computes in; master weights are float32 or wider"
    )
    seed: int = Field(
        0, ge=0, lt=2**63, description="of random weights and of the order of documents"
    )
    loss: LossName = Field(
        CROSS_ENTROPY, description="cross-entropy, or package.module:function of your own"
    )
    optimizer: OptimizerName = Field(
        "adamw",
        description=(
            "adamw; sgd: a moment less in the training state; or package.module:Rule of your own"
        ),
    )
    momentum: Fraction | None = Field(
        None, description="of sgd: 0.9 where it is not given; 0 keeps no moment"
    )
    weight_decay: Rate = Field(
        0.1, ge=0, description="decay of matrices and embeddings; norms and biases do not decay"
    )
    betas: tuple[Fraction, Fraction] = Field(
        (0.9, 0.95), description="of adamw: decay rates of the two moments"
    )
    eps: Rate = Field(1e-8, gt=0, description="of adamw: added to the root of the second moment")
    deterministic: bool = Field(
        False,
        description="equal runs on equal devices give equal bits, where faster kernels would not",
    )
    compile: bool = Field(
        False,
        description=(
            "compile norms, rotary embedding, gated activations and the loss: faster from the"
            " second step on"
        ),
    )
    timeout: Seconds | None = Field(
        None,
        description=(
            "seconds after which a collective fails because a rank does not answer; derived from"
            " the longest document"
        ),
    )
    on_step: ObjectText | None = Field(
        None,
        description=(
            "a function of yours, as in my_module:watch, that rank 0 calls after each step"
            " (docs/extending.md)"
        ),
    )
    stall_timeout: Seconds = Field(
        60.0, description="seconds that a local rank may be stopped (SIGSTOP) before the run ends"
    )

    @field_validator("min_lr", mode="before")
    @classmethod
    def _tenth_of_lr(cls, value: object, info: ValidationInfo) -> object:
        """As a number: null in the config of a run stands for the default."""
        return default_min_lr(info.data) if value is None else value

    @field_serializer("min_lr")
    def _null_for_default(self, value: float) -> float | None:
        """As a config says it: a tenth that is not written follows an lr that is changed."""
        return None if value == default_min_lr({"lr": self.lr}) else value

    @model_validator(mode="after")
    def _consistent(self) -> "TrainConfig":
        if not self.steps:
            raise ValueError("steps must be given")
        if self.stages and self.steps != (total := sum(stage["steps"] for stage in self.stages)):
            raise ValueError(
                f"steps is {self.steps} and the stages have {total} together; leave steps out, or"
                " change a stage's"
            )
        instead = {"adamw": "adamw has train.betas", "sgd": "sgd has train.momentum"}
        has = instead.get(self.optimizer, f"{self.optimizer} has numbers of its own")
        for name, optimizer in {"momentum": "sgd", "betas": "adamw", "eps": "adamw"}.items():
            # The default may also be written out, as in the config of a run folder.
            default = type(self).model_fields[name].default
            if self.optimizer != optimizer and getattr(self, name) != default:
                raise ValueError(
                    f"{name} is of train.optimizer={optimizer}; {has}: leave {name} out"
                )
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above lr {self.lr:g}")
        if self.warmup > self.steps:
            raise ValueError(
                f"warmup {self.warmup} is longer than the run of {self.steps} steps; write"
                f" train.warmup={self.steps // 10}"
            )
        return self

    @property
    def rule(self) -> Rule:
        """How an update changes weights. Raises UsageError for code that is not there."""
        # Zero is a choice, which keeps no moment.
        momentum = 0.9 if self.momentum is None else self.momentum
        moment_names = () if self.optimizer in OPTIMIZERS else load_rule(self.optimizer).moments
        return Rule(self.optimizer, self.weight_decay, self.betas, self.eps, momentum, moment_names)
