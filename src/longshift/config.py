"""One YAML file is the whole truth about a run. It is validated, every fault at once, before torch
is imported.

    model: {preset: tiny-llama}
    data: {train: [{corpus: python}], max_len: 32K, overlong: split}
    train: {tokens_per_step: 64K, steps: 200, lr: 3e-4}
    layout: dp2.tp2
    save: {dir: runs/demo}

Paths are taken from the working directory and made absolute, so that the copy of the config in the
run folder stays true."""

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from longshift.config_parts import (
    DataConfig,
    HomeAt,
    Layouts,
    ModelConfig,
    PathText,
    Section,
    Size,
    name_or_object,
)
from longshift.errors import UsageError
from longshift.layout import legal
from longshift.layout.auto_layout import AutoLayout
from longshift.layout.home_tiers import TIERS, HomeTiers
from longshift.layout.layout import UNITS, Layout, format_size
from longshift.schedule.chunks import StreamOptions
from longshift.spec.formats import (
    Format,
    GradientWire,
    MomentFormat,
    WeightWire,
    Wire,
    formats_of,
)
from longshift.spec.model import CROSS_ENTROPY, ModelSpec
from longshift.spec.positions import stretched
from longshift.spec.rule import OPTIMIZERS
from longshift.train_config import TrainConfig
from longshift.workload.groups import SLOW_FLOPS, Edge, home_layout, timeout_s

TRACKER_NAMES = ("tensorboard", "wandb", "trackio", "mlflow")


TrackerText = Annotated[str, name_or_object(*TRACKER_NAMES)]


class SaveConfig(Section):
    """The run folder and its checkpoints."""

    dir: PathText = Field(description="the run folder: config, metrics, checkpoints")
    every: Size = Field(100, description="steps between checkpoints; the last step has one, too")
    keep: Size = Field(3, description="how many of the newest checkpoints stay")
    trackers: tuple[TrackerText, ...] = Field(
        (),
        description=(
            "where the rows of metrics.jsonl go, too: tensorboard, wandb, trackio, mlflow, or a"
            " class of yours, as in my_module:MyTracker (docs/extending.md)"
        ),
    )
    project: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = Field(
        "longshift", description="the run's project at the trackers"
    )

    @field_validator("trackers", mode="before")
    @classmethod
    def _one_is_some(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("trackers")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(value))


class ValidationConfig(Section):
    """Validation on data.valid, or data.held_out. The checkpoint with the lowest loss is kept
    besides the newest."""

    every: Size = Field(
        default=100, description="steps between validations; the last step has one, too"
    )
    tokens: Size = Field(
        default=UNITS["M"],
        description="validate on as many whole documents as have this many tokens",
    )
    patience: Size | None = Field(
        default=None, description="the run ends after this many validations without a lower loss"
    )


class StreamConfig(Section):
    """Of layouts that offload to disk, and of a home there."""

    folder: PathText | None = Field(
        default=None,
        description=(
            "where the disk tier, and a home on disk, keep their files; the run folder where it is"
            " not given"
        ),
    )

    def options(self, run: Path) -> StreamOptions:
        return StreamOptions(self.folder or str(run))


class WireConfig(Section):
    """Number formats of gathers and reductions under ZeRO 1 to 3. Exchanges of a switch keep those
    of weights and sums."""

    gradients: GradientWire = Field(
        default="float32",
        description="of gradients on the way home: float32 (that of sums), bf16 or float8",
    )
    weights: WeightWire = Field(
        default="compute",
        description="of weights that are gathered: compute (that of working copies) or float8",
    )

    @property
    def formats(self) -> Wire:
        return Wire(self.gradients, self.weights)


class HomeConfig(Section):
    """Where the training state lies, and in which format. `home: disk` is short for `home: {at:
    disk}`, and `home: {device: 8G, host: rest}` for `home: {at: {device: 8G, host: rest}}`; `home:
    auto` is chosen with `layout: auto`."""

    at: HomeAt = Field(
        default=HomeTiers(),
        description=(
            "where master weights, moments and gradient sums lie: device, host or disk, or so many"
            " bytes of a rank in each, as in {device: 8G, host: rest}; auto, with layout: auto:"
            " what the planner finds"
        ),
    )
    moments: MomentFormat = Field(
        default="float32",
        description="format of moments between updates: float32 (that of masters), bf16 or float8",
    )

    @model_validator(mode="before")
    @classmethod
    def _a_word(cls, value: object) -> object:
        if isinstance(value, str):
            return {"at": value}
        if not isinstance(value, dict) or "at" in value or not any(tier in value for tier in TIERS):
            return value
        tiers = {tier: size for tier, size in value.items() if tier in TIERS}
        return {"at": tiers} | {key: field for key, field in value.items() if key not in TIERS}


class Config(Section):
    """A run."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    layout: Layouts = Field(
        Layout(),
        description=(
            "the parallel layout: words such as dp2.tp2, a list of layouts by document length, or"
            " auto"
        ),
    )
    home: HomeConfig = HomeConfig()
    save: SaveConfig
    validation: ValidationConfig | None = None
    stream: StreamConfig = StreamConfig()
    wire: WireConfig = WireConfig()

    @model_validator(mode="after")
    def _validates_on_something(self) -> "Config":
        if self.validation is not None and self.data.valid is None and self.data.held_out is None:
            raise ValueError(
                "validation needs documents: data.valid, or data.held_out=0.01 for a hundredth of"
                " data.train"
            )
        return self

    @model_validator(mode="after")
    def _groups_hold_all(self) -> "Config":
        if isinstance(self.layout, Layout | AutoLayout):
            return self
        longest = format_size(self.data.max_len)
        last = self.layout[-1]
        if last.upto < self.data.max_len:
            raise ValueError(
                f"the last group, {last.use}, ends at {format_size(last.upto)} tokens and"
                f" data.max_len is {longest}; write its upto: {longest}, or"
                f" data.max_len={format_size(last.upto)}"
            )
        worlds = {edge.use.world for edge in self.layout}
        if len(worlds) > 1:
            counts = ", ".join(f"{edge.use} has {edge.use.world}" for edge in self.layout)
            raise ValueError(f"every group's layout must use the same number of ranks: {counts}")
        return self

    @model_validator(mode="after")
    def _of_home(self) -> "Config":
        if self.home.at.auto and not isinstance(self.layout, AutoLayout):
            raise ValueError(
                "home: auto is chosen with layout: auto; write home: device, host or disk"
            )
        if self.home.moments == "float8" and self.train.optimizer not in OPTIMIZERS:
            raise ValueError(
                "home.moments: float8 keeps second moments as their roots, and which moments are"
                " such is known of adamw and sgd alone; write home.moments=bf16, or leave it out"
            )
        # A rule of the user's own is not loaded to read a config.
        if (
            self.home.moments != "float32"
            and self.train.optimizer in OPTIMIZERS
            and not self.train.rule.moments
        ):
            raise ValueError(
                f"home.moments is a format of moments, and {self.train.rule} keeps none: leave"
                " it out"
            )
        return self

    @model_validator(mode="after")
    def _wire_carries(self) -> "Config":
        if not self.wire.formats.coded:
            return self
        if self.wire.weights != "compute" and (
            isinstance(self.layout, AutoLayout) or len(self.edges) > 1
        ):
            raise ValueError(
                "wire.weights: float8 is for one layout: a switch takes weights from working copies"
                " too, which would not be home's; leave wire.weights out"
            )
        if isinstance(self.layout, AutoLayout):
            if dict(self.layout.fixed).get("z") == (0,):
                raise ValueError(
                    "wire is for what ZeRO deals over ranks, and layout: auto may choose z0 alone:"
                    " write z: [1, 2, 3]"
                )
        elif (home := home_layout(self.edges)).zero == 0 and home.world > 1:
            raise ValueError(
                f"wire is for what ZeRO deals over ranks, and with {home} each keeps all that it"
                f" computes with; write layout={replace(home, zero=1)} (or z2, z3), or leave"
                " wire out"
            )
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> "Config":
        if self.train.stages and isinstance(self.layout, AutoLayout):
            raise ValueError(
                "layout: auto is chosen for a run without train.stages; name layouts (longshift"
                " plan finds them)"
            )
        for number, part in enumerate(self.parts if self.train.stages else ()):
            if any(edge.use.open for edge in part.edges):
                raise ValueError(
                    f"train.stages.{number}: chunk-auto and recompute-auto are chosen for runs"
                    " without stages; write the chunk, or the recomputation"
                )
            if part.world != self.world:
                raise ValueError(
                    f"train.stages.{number}: its layout has {part.world} ranks and the run's has"
                    f" {self.world}; all need the same number"
                )
        return self

    @property
    def formats(self) -> Format:
        """Of numbers, and how many moments home keeps."""
        return formats_of(
            self.train.precision, len(self.train.rule.moments), self.home.moments, self.wire.formats
        )

    @property
    def float8(self) -> bool:
        """Whether matmuls take factors of eight bits. Loads no rule of the user's own, which
        `formats` asks for its moments."""
        return formats_of(self.train.precision).float8

    @property
    def parts(self) -> tuple["Config", ...]:
        """The config of each stage, whose `train.steps` is the run's step at which the stage ends;
        the config itself where there are none. Raises ValueError that names the stage."""
        if not self.train.stages:
            return (self,)
        parts: list[Config] = []
        end = 0
        for number in range(len(self.train.stages)):
            values = self.model_dump(mode="json")
            stage = values["train"]["stages"][number]
            end += stage.pop("steps")
            if "train.lr" in stage:  # a schedule of its own, over its own steps
                values["train"] |= {"min_lr": None, "warmup": 0}
            for key, value in stage.items():
                section, _, name = key.rpartition(".")
                (values[section] if section else values)[name] = value
            values["train"] |= {
                "stages": [],
                "steps": end,
                "warmup": min(values["train"]["warmup"], end),
            }
            try:
                parts.append(Config.model_validate(values))
            except ValidationError as fault:
                error = fault.errors(include_url=False)[0]
                key = ".".join(map(str, error["loc"])) or "config"
                raise ValueError(
                    f"train.stages.{number}: {key}:"
                    f" {error.get('ctx', {}).get('error', error['msg'])}"
                ) from None
        return tuple(parts)

    @model_validator(mode="after")
    def _rope_stretches(self) -> "Config":
        try:
            _ = self.spec
        except UsageError as fault:
            raise ValueError(f"model.rope: {fault}") from None
        return self

    @cached_property
    def spec(self) -> ModelSpec:
        """The model that is trained, in numbers."""
        rope = self.model.rope
        spec = (
            self.model.spec
            if self.train.loss == CROSS_ENTROPY
            else replace(self.model.spec, loss=self.train.loss)
        )
        if rope is None:
            return spec
        return stretched(spec, rope.type, self.data.max_len, rope.factor, rope.theta, rope.trained)

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The groups of lengths; a single layout is one group. Raises UsageError while `layout:
        auto` has not been chosen."""
        if isinstance(self.layout, AutoLayout):
            raise UsageError(
                "layout: auto is chosen before ranks start: longshift plan CONFIG --emit FILE"
                " writes it down"
            )
        return (
            (Edge(self.data.max_len, self.layout),)
            if isinstance(self.layout, Layout)
            else self.layout
        )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.edges[0].use.world

    def edge_faults(self, edge: Edge, world: int | None = None) -> tuple[str, ...]:
        """Why the layout of a group of lengths is not possible, with `world` ranks where that is
        given."""
        # Documents are cut to max_len before they are grouped.
        longest = min(edge.upto, self.data.max_len)
        return legal.faults(self.spec, edge.use, world, longest, edge.pack, self.float8)

    def check_layouts(self, world: int | None = None) -> None:
        """Raises UsageError where a layout is not possible, with `world` ranks where that is
        given."""
        for edge in self.edges:
            legal.refuse(edge.use, self.edge_faults(edge, world))

    def timeout_s(self, device: str) -> float:
        """Seconds after which a collective fails, where ranks compute on devices of this type."""
        derived = timeout_s(
            self.spec,
            self.edges,
            self.data.max_len,
            self.train.tokens_per_step,
            SLOW_FLOPS[device],
        )
        return self.train.timeout or derived

    def with_layout(self, layout: Any, home: Any = None) -> "Config":
        """The same with a layout, and a home if one is given, in the config's form."""
        # Validated again, which a copy of the model would not be.
        values: dict[str, Any] = self.model_dump(mode="json")
        if home is not None:
            values["home"]["at"] = home
        return Config.model_validate({**values, "layout": layout})

    def to_yaml(self) -> str:
        """The resolved config; `parse_config` of it gives an equal one."""
        return yaml.safe_dump(
            self.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=120
        )
