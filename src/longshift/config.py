"""One YAML file is the whole truth about a run. It is validated, every fault at once, before torch is imported.

    model: {preset: tiny-llama}
    data: {train: [{corpus: python}], max_len: 32K, overlong: split}
    train: {tokens_per_step: 64K, steps: 200, lr: 3e-4}
    layout: dp2.tp2
    save: {dir: runs/demo}

Paths are taken from the working directory and made absolute, so that the copy of the config in the run folder stays true.
"""

import copy
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)

from longshift.errors import UsageError, did_you_mean, shown
from longshift.files import absolute, read_small
from longshift.layout import legal
from longshift.layout.layout import AUTO, MOST_SIZE, UNITS, Layout, format_size, parse_size
from longshift.other_tools import key_hint
from longshift.planner.asked import AutoLayout
from longshift.program.step import Windows
from longshift.schedule.chunks import StreamOptions
from longshift.spec.families import preset, read_spec
from longshift.spec.formats import PrecisionName
from longshift.spec.model import ModelSpec
from longshift.spec.stretch import Stretch, stretched
from longshift.switch.itinerary import SwitchOptions
from longshift.switch.planners import Planner
from longshift.workload import waits
from longshift.workload.groups import Edge, parse_edges
from longshift.workload.lengths import Overlong
from longshift.written import MOST_BYTES, not_text, read_yaml


def _parse_layout(value: object) -> "Layout | tuple[Edge, ...] | AutoLayout":
    try:
        if value == "auto" or isinstance(value, dict):
            return AutoLayout.parse(value)
        if isinstance(value, str):
            return Layout.parse(value)
        if isinstance(value, list | tuple):
            return parse_edges(value)
    except UsageError as fault:
        raise ValueError(str(fault).removeprefix("layout: ")) from None
    raise ValueError("auto, one layout such as dp2.tp2, or groups of lengths, such as [{upto: 4K, use: dp4}, {upto: 32K, use: u4}]")


def _layout_out(value: "Layout | tuple[Edge, ...] | AutoLayout") -> object:
    if isinstance(value, Layout):
        return str(value)
    if isinstance(value, AutoLayout):
        return value.to_json()
    return [edge.told() for edge in value]


def _absolute(value: object) -> object:
    return absolute(value) if isinstance(value, str) and value else value


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"a number is needed, and YAML reads this as {str(value).lower()}")
    return value


def _some(value: object) -> object:
    if value in ([], ()):
        raise ValueError("name at least one source, as in train: [{corpus: python}]")
    return value


Decay = Literal["cosine", "linear", "constant"]
Learn = Literal["assistant", "last", "all"]
Size = Annotated[int, BeforeValidator(parse_size), Field(ge=1, le=MOST_SIZE, strict=True)]
Number = Annotated[float, BeforeValidator(_number)]
Seconds = Annotated[Number, Field(gt=0, le=1e7)]  # four months; clocks of collectives take no centuries
Rate = Annotated[Number, Field(le=1e6)]  # a step by more leaves fp32
Count = Annotated[int, BeforeValidator(parse_size), Field(ge=0, le=MOST_SIZE, strict=True)]
PathText = Annotated[str, BeforeValidator(_absolute), Field(min_length=1)]
Layouts = Annotated[Layout | tuple[Edge, ...] | AutoLayout, PlainValidator(_parse_layout), PlainSerializer(_layout_out)]


MOST_FAULTS = 50  # that are listed
LEAST_BUCKET = 4 * UNITS["K"]  # below, starting a message takes longer than its bytes
MOST_BUCKETS = 1 << 17  # of a model: a plan lists the moves of each


class Section(BaseModel):
    """A part of the config: frozen, and a key that it does not know is a fault."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RopeConfig(Section):
    """Another rotary embedding than the model's, for documents longer than it was trained on (`spec.stretch`). `factor`: how many times as
    long, data.max_len over the trained positions where it is not given; `trained`: those positions, where config.json says others."""

    type: Stretch
    factor: Annotated[Number, Field(ge=1, le=1e6)] | None = None
    theta: Annotated[Number, Field(gt=1, le=1e15)] | None = None
    trained: Size | None = None


class ModelConfig(Section):
    """Which model: a preset of Longshift, or a Hugging Face folder. A preset is always initialised from scratch."""

    preset: str | None = None
    rope: RopeConfig | None = None
    path: PathText | None = None
    init: Literal["pretrained", "scratch"] = Field(default_factory=lambda data: "pretrained" if data.get("path") else "scratch")

    @model_validator(mode="after")
    def _one_of(self) -> "ModelConfig":
        if (self.preset is None) == (self.path is None):
            raise ValueError("name exactly one of preset and path, as in model: {preset: tiny-llama}")
        if self.preset is not None and self.init == "pretrained":
            raise ValueError("a preset has no pretrained weights; leave init out, or give a model path")
        try:
            _ = self.spec
        except UsageError as fault:
            raise ValueError(str(fault)) from None
        return self

    @cached_property
    def spec(self) -> ModelSpec:
        """The model in numbers."""
        return preset(self.preset or "") if self.path is None else read_spec(Path(self.path))


class Source(Section):
    """Where documents come from. `path` is a file, a folder or a pattern. `text` names the field that holds the text; `messages`, the one
    that holds a conversation; `prompt` and `completion`, two texts, or lists of messages, of which the second is learned. `learn`: the
    turns of a conversation that are targets. `epochs`: how many times the source is read while others are read once; `weight`: its share
    of the tokens, which every source has or none."""

    path: PathText | None = None
    corpus: Literal["python"] | None = None
    text: str = "text"
    messages: str | None = None
    prompt: str | None = None
    completion: str | None = None
    learn: Learn = "assistant"
    epochs: Annotated[Number, Field(gt=0, le=1e6)] | None = None
    weight: Annotated[Number, Field(gt=0, le=1e6)] | None = None

    @model_validator(mode="after")
    def _one_of(self) -> "Source":
        if (self.path is None) == (self.corpus is None):
            raise ValueError("name exactly one of path and corpus, as in {path: books/*.parquet, text: text} or {corpus: python}")
        if (self.prompt is None) != (self.completion is None):
            raise ValueError("prompt and completion belong together, as in {path: pairs.jsonl, prompt: prompt, completion: completion}")
        given = (self.text != "text") + (self.messages is not None) + (self.prompt is not None)
        if given > (self.corpus is None):
            raise ValueError("name one of text, messages, or prompt with completion, and none of them for a corpus")
        if self.learn != "assistant" and not self.masked:
            raise ValueError("learn is for messages, or prompt and completion; every token of a text is learned")
        if self.learn == "last" and self.prompt is not None:
            raise ValueError("learn: last is for messages; of prompt and completion, the completion is learned")
        if self.epochs is not None and self.weight is not None:
            raise ValueError("name one of epochs and weight")
        return self

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields that make a document."""
        if self.prompt is not None and self.completion is not None:
            return self.prompt, self.completion
        return (self.messages or self.text,)

    @property
    def masked(self) -> bool:
        """Whether some tokens are no targets."""
        return self.messages is not None or self.prompt is not None


class DataConfig(Section):
    """Documents and how they become tokens. `max_len` is the longest document in tokens; `overlong`, what happens to a longer one,
    must be given as soon as there is one. `template`: a chat template, the tokenizer's own where not given. `cache` is where tokens and the
    project's tokenizer are kept."""

    train: Annotated[tuple[Source, ...], BeforeValidator(_some)]
    tokenizer: PathText | None = None
    template: PathText | None = None
    valid: Annotated[tuple[Source, ...], BeforeValidator(_some)] | None = None
    held_out: Annotated[Number, Field(gt=0, le=0.5)] | None = Field(None, description="share of the documents of train to validate on")
    max_len: Annotated[Size, Field(ge=2)]
    overlong: Overlong | None = None
    cache: PathText = Field("~/.cache/longshift", validate_default=True)

    @model_validator(mode="after")
    def _valid_or_held_out(self) -> "DataConfig":
        if self.valid is not None and self.held_out is not None:
            raise ValueError("name one of valid, documents of their own, and held_out, a share of train's")
        return self

    @model_validator(mode="after")
    def _all_weigh_or_none(self) -> "DataConfig":
        weighed = [source.weight is not None for source in self.train]
        if any(weighed) and not (all(weighed) and len(weighed) > 1):
            raise ValueError("weight is a share of the tokens: every source of several needs one, or none; epochs needs no other")
        return self

    @model_validator(mode="after")
    def _tokenizer_exists(self) -> "DataConfig":
        if self.tokenizer is not None and not Path(self.tokenizer).exists():
            raise ValueError(f"tokenizer {self.tokenizer} does not exist; it is a tokenizer.json or a folder that holds one")
        return self


class StageConfig(Section):
    """A part of a run that trains otherwise than the run's own sections say, in what is given: data.max_len, data.train, data.overlong,
    train.tokens_per_step, train.pack_tokens, layout, model.rope. With `lr`, a stage has a schedule of its own, over its own steps; without
    it, the run's goes on."""

    steps: Size
    max_len: Annotated[Size, Field(ge=2)] | None = None
    data: Annotated[tuple[Source, ...], BeforeValidator(_some)] | None = None
    overlong: Overlong | None = None
    tokens_per_step: Size | None = None
    pack_tokens: Size | None = None
    layout: Layouts | None = None
    rope: RopeConfig | None = None
    lr: Annotated[Rate, Field(gt=0)] | None = None
    min_lr: Annotated[Number, Field(ge=0)] | None = None
    warmup: Count | None = None
    schedule: Decay | None = None

    @model_validator(mode="after")
    def _schedule_whole(self) -> "StageConfig":
        if self.lr is None and any(value is not None for value in (self.min_lr, self.warmup, self.schedule)):
            raise ValueError("min_lr, warmup and schedule are of a stage that has lr; without lr the run's schedule goes on")
        if isinstance(self.layout, AutoLayout):
            raise ValueError("layout: auto is chosen for a whole run; name the layout of a stage (longshift plan finds it)")
        return self

    @property
    def changes(self) -> dict[tuple[str, str], object]:
        """The run's keys that the stage sets, as a config has them."""
        given = self.model_dump(mode="json", exclude_none=True)
        keys = {"max_len": "data", "overlong": "data", "tokens_per_step": "train", "pack_tokens": "train", "rope": "model"}
        changed: dict[tuple[str, str], object] = {(keys[name], name): given[name] for name in keys if name in given}
        if self.data is not None:
            changed["data", "train"] = given["data"]
        if self.lr is not None:
            rates = {"lr": self.lr, "min_lr": 0.1 * self.lr if self.min_lr is None else self.min_lr, "warmup": self.warmup or 0}
            changed |= {("train", name): value for name, value in rates.items()}
            changed |= {("train", "schedule"): self.schedule} if self.schedule else {}
        return changed


class TrainConfig(Section):
    """Steps and the optimizer. A step takes whole documents until `tokens_per_step` is reached, whatever the layout. `deterministic`: equal
    runs on equal devices give equal bits, where faster kernels would not. `timeout`: seconds after which a collective fails because a rank
    does not answer; `workload.waits` derives it from the longest document where it is not given; `frozen`: seconds that a local rank may
    be stopped before the launcher ends the run."""

    tokens_per_step: Size
    pack_tokens: Size | None = Field(None, description="capacity of a pack; data.max_len where it is not given")
    stages: tuple[StageConfig, ...] = Field((), description="parts of the run, in order, whose steps add up to steps")
    steps: Size
    lr: Rate = Field(gt=0)
    min_lr: Number = Field(default_factory=lambda data: 0.1 * data.get("lr", 0.0), ge=0)
    warmup: Count = 0
    schedule: Decay = "cosine"
    clip: Annotated[Number, Field(gt=0)] | None = Field(1.0, description="largest global gradient norm; null leaves it alone")
    precision: PrecisionName = "bf16"
    seed: int = Field(0, ge=0, lt=2**63)
    weight_decay: Rate = Field(0.1, ge=0)
    betas: tuple[Annotated[Number, Field(ge=0, lt=1)], Annotated[Number, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: Rate = Field(1e-8, gt=0)
    deterministic: bool = Field(False, description="kernels that give the same bits in every run, where faster ones do not")
    timeout: Seconds | None = Field(None, description="seconds; derived from the step where it is not given")
    frozen: Seconds = Field(60.0, description="seconds that a rank may be stopped (SIGSTOP) before the run ends")

    @model_validator(mode="before")
    @classmethod
    def _steps_of_stages(cls, values: object) -> object:
        """With the stages' steps together, where nothing else is said."""
        stages = values.get("stages") if isinstance(values, dict) else None
        if isinstance(values, dict) and isinstance(stages, list | tuple) and stages and "steps" not in values:
            try:
                return values | {"steps": sum(StageConfig.model_validate(stage).steps for stage in stages)}
            except ValidationError:
                return values
        return values

    @model_validator(mode="after")
    def _consistent(self) -> "TrainConfig":
        if self.stages and self.steps != (total := sum(stage.steps for stage in self.stages)):
            raise ValueError(f"steps is {self.steps} and the stages have {total} together; leave steps out, or change a stage's")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above lr {self.lr:g}")
        if self.warmup > self.steps:
            raise ValueError(f"warmup {self.warmup} is longer than the run of {self.steps} steps; write train.warmup={self.steps // 10}")
        return self


class SaveConfig(Section):
    """The run folder; a checkpoint every `every` steps and at the end, of which the newest `keep` stay."""

    dir: PathText
    every: Size = 100
    keep: Size = 3
    tensorboard: bool = False


class ValidationConfig(Section):
    """Validation on data.valid, or data.held_out: every so many steps and after the last, on as many whole documents as have `tokens`. The
    checkpoint with the lowest loss is kept besides the newest. `patience`: after so many validations without a lower loss the run ends."""

    every: Size = 100
    tokens: Size = UNITS["M"]
    patience: Size | None = None


class SwitchConfig(Section):
    """How weights move where the layout changes inside a step. `bucket`: the most that a rank sends, or receives, at one time; `ahead`: how
    much of the next layout's weights may come while the one before still computes."""

    planner: Planner = "fan_out"
    bucket: Annotated[Size, Field(ge=LEAST_BUCKET)] = 32 * UNITS["M"]
    ahead: Count = 256 * UNITS["M"]

    @property
    def options(self) -> SwitchOptions:
        return SwitchOptions(self.planner, self.bucket, self.ahead)


class WindowConfig(Section):
    """How many bytes may be under way on a rank. `gather`: weights that come and are not used yet; `reduce`: gradient sums that are not
    home yet. One of each may always be under way. Where a number is not given, it is the largest block's."""

    gather: Size | None = None
    reduce: Size | None = None

    @property
    def options(self) -> Windows:
        return Windows(self.gather, self.reduce)


class StreamConfig(Section):
    """Of layouts in chunks, and of those that offload. `folder`: where `disk` keeps its file, the run's own where not given; `ahead`: how
    many operations before its use an object is fetched; `checked`: what comes back from disk is compared with what went out."""

    folder: PathText | None = None
    ahead: int = Field(default=1, ge=0, le=1 << 20)
    checked: bool = False

    def options(self, run: Path) -> StreamOptions:
        return StreamOptions(self.folder or str(run), self.ahead, self.checked)


class Config(Section):
    """A run."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    layout: Layouts = Layout()
    save: SaveConfig
    validation: ValidationConfig | None = None
    switch: SwitchConfig = SwitchConfig()
    stream: StreamConfig = StreamConfig()
    window: WindowConfig = WindowConfig()

    @model_validator(mode="after")
    def _a_pack_holds_a_document(self) -> "Config":
        if isinstance(self.layout, Layout) and self.pack_tokens < self.data.max_len:
            pack, longest = format_size(self.pack_tokens), format_size(self.data.max_len)
            raise ValueError(
                f"train.pack_tokens {pack} is less than data.max_len {longest}, and a pack must hold the longest document; "
                f"write train.pack_tokens={longest} or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _validates_on_something(self) -> "Config":
        if self.validation is not None and self.data.valid is None and self.data.held_out is None:
            raise ValueError("validation needs documents: data.valid, or data.held_out=0.01 for a hundredth of data.train")
        return self

    @model_validator(mode="after")
    def _groups_hold_all(self) -> "Config":
        if self.train.pack_tokens is not None and isinstance(self.layout, AutoLayout):
            raise ValueError("train.pack_tokens is for a single layout, and layout: auto chooses packs: leave pack_tokens out")
        if isinstance(self.layout, Layout | AutoLayout):
            return self
        longest, last = format_size(self.data.max_len), self.layout[-1]
        if last.upto < self.data.max_len:
            raise ValueError(
                f"the last group, {last.use}, ends at {format_size(last.upto)} tokens and data.max_len is {longest}; "
                f"write its upto: {longest}, or data.max_len={format_size(last.upto)}"
            )
        if self.train.pack_tokens is not None:
            pack = format_size(self.train.pack_tokens)
            raise ValueError(f"train.pack_tokens is for a single layout; leave it out, or write pack: {pack} in a group")
        worlds = {edge.use.world for edge in self.layout}
        if len(worlds) > 1:
            each = ", ".join(f"{edge.use} has {edge.use.world}" for edge in self.layout)
            raise ValueError(f"every group's layout must use the same number of ranks: {each}")
        return self

    @model_validator(mode="after")
    def _buckets_few(self) -> "Config":
        least = 4 * self.model.spec.parameters // MOST_BUCKETS
        if self.switch.bucket < least and not isinstance(self.layout, Layout):
            raise ValueError(
                f"switch.bucket of {format_size(self.switch.bucket)} cuts the model's weights into more than {MOST_BUCKETS} pieces; "
                f"write switch.bucket={-(-least // UNITS['M'])}M, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> "Config":
        if self.train.stages and isinstance(self.layout, AutoLayout):
            raise ValueError("layout: auto is chosen for a run without train.stages; name layouts (longshift plan finds them)")
        for number, part in enumerate(self.parts if self.train.stages else ()):
            if any(edge.use.chunk == AUTO for edge in part.edges):
                raise ValueError(f"train.stages.{number}: chunk-auto is chosen for runs without stages; write a number of tokens")
            if part.world != self.world:
                raise ValueError(
                    f"train.stages.{number}: its layout has {part.world} ranks and the run's has {self.world}; all need the same number"
                )
        return self

    @property
    def parts(self) -> tuple["Config", ...]:
        """The config of each stage, whose `train.steps` is the run's step at which the stage ends; the config itself where there are none.
        Raises ValueError that names the stage."""
        if not self.train.stages:
            return (self,)
        plain, found, end = self.model_dump(mode="json"), list[Config](), 0
        for number, stage in enumerate(self.train.stages):
            end += stage.steps
            values = copy.deepcopy(plain)
            values["train"] |= {"stages": [], "steps": end}
            for (section, key), value in stage.changes.items():
                values[section][key] = value
            values["train"]["warmup"] = min(values["train"]["warmup"], end)
            if stage.layout is not None:
                values["layout"] = _layout_out(stage.layout)
            try:
                found.append(Config.model_validate(values))
            except ValidationError as fault:
                first = fault.errors(include_url=False)[0]
                why = first.get("ctx", {}).get("error", first["msg"])
                raise ValueError(f"train.stages.{number}: {'.'.join(map(str, first['loc'])) or 'config'}: {why}") from None
        return tuple(found)

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
        if rope is None:
            return self.model.spec
        return stretched(self.model.spec, rope.type, self.data.max_len, rope.factor, rope.theta, rope.trained)

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The groups of lengths; a single layout is one group. Raises UsageError while `layout: auto` has not been chosen."""
        if isinstance(self.layout, AutoLayout):
            raise UsageError("layout: auto is chosen before ranks start: longshift plan CONFIG --emit FILE writes it down")
        return (Edge(self.data.max_len, self.layout, self.pack_tokens),) if isinstance(self.layout, Layout) else self.layout

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.edges[0].use.world

    @property
    def pack_tokens(self) -> int:
        """Capacity of a single layout's packs in tokens."""
        return self.train.pack_tokens or self.data.max_len

    def timeout_s(self, device: str) -> float:
        """Seconds after which a collective fails, where ranks compute on devices of this type."""
        derived = waits.timeout_s(self.spec, self.edges, self.data.max_len, self.train.tokens_per_step, waits.SLOW_FLOPS[device])
        return self.train.timeout or derived

    def to_yaml(self) -> str:
        """The resolved config; `parse_config` of it gives an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=120)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config file and apply `key=value` overrides, such as `train.lr=2e-5`. Raises UsageError that lists every fault."""
    path = Path(path)
    try:
        text = read_small(path, MOST_BYTES)
    except FileNotFoundError:
        raise UsageError(f"config {path} does not exist; write one with: longshift init --to {path}") from None
    except (OSError, ValueError) as fault:
        raise UsageError(f"config {str(path)[:300]} cannot be read: {fault}") from None
    return parse_config(text, overrides, name=str(path))


def parse_config(text: str, overrides: Sequence[str] = (), name: str = "config") -> Config:
    """As `load_config`, of text; `name` stands for the file in faults."""
    written = read_yaml(text, name)
    values = written.value
    if not isinstance(values, dict):
        raise UsageError(f"{name}: a config is a mapping with the keys {', '.join(Config.model_fields)}; see longshift init")
    places = {key: f"{name}:{line}" for key, line in written.lines.items()}
    faults = [f"{name}:{line}: {'.'.join(map(str, key))}: given twice" for key, line in written.twice]
    for override in overrides:
        key, sign, value = override.partition("=")
        keys = tuple(key.split("."))
        if not sign or not all(keys):
            faults.append(f"command line: {shown(override)}: an override is key=value, as in train.lr=2e-5")
        elif why := not_text(override) or ("more than 32 dots in its key" if len(keys) > 32 else None):
            faults.append(f"command line: {shown(override)} holds {why}")
        elif not _put(values, keys, _value(value)):
            faults.append(f"command line: {key[:80]}: {'.'.join(keys[:-1])[:80]} is not a section")
        else:
            places[keys] = "command line"
            places |= {keys[:n]: "command line" for n in range(1, len(keys)) if keys[:n] not in places}
    try:
        config = Config.model_validate(values)
    except ValidationError as fault:
        found = fault.errors(include_url=False)
        found = [error for error in found if error["type"] != "default_factory_not_called"]
        faults += [_describe(error, places, name) for error in found[:MOST_FAULTS]] + [""] * len(found[MOST_FAULTS:])
    else:
        place = places.get(("layout",), name)
        for number, part in enumerate(() if isinstance(config.layout, AutoLayout) else config.parts):
            stage = f"train.stages.{number}: " if config.train.stages else ""
            for edge in part.edges:
                at = "layout" if isinstance(part.layout, Layout) else f"layout (upto {format_size(edge.upto)})"
                longest = min(edge.upto, part.data.max_len)
                faults += [f"{place}: {stage}{at}: {fault}" for fault in legal.faults(part.spec, edge.use, None, longest, edge.pack)]
        if not faults:
            return config
    count = f"{len(faults)} faults" if len(faults) > 1 else "1 fault"
    more = [f"and {len(faults) - MOST_FAULTS} more"] if len(faults) > MOST_FAULTS else []
    raise UsageError("\n  ".join([f"{name}: {count} in the config", *faults[:MOST_FAULTS], *more]))


def _value(text: str) -> object:
    """The value of an override: YAML, or the text as it stands where it is none that is read here."""
    try:
        return read_yaml(text, "command line").value
    except UsageError:
        return text


def _put(values: dict[str, Any], keys: tuple[str, ...], value: object) -> bool:
    """Set a nested key in place; False where the way to it leads through something that is not a mapping."""
    for key in keys[:-1]:
        values = values.setdefault(key, {}) if isinstance(values, dict) else None  # pyright: ignore[reportAssignmentType]
    if not isinstance(values, dict):
        return False
    values[keys[-1]] = value
    return True


def _fields(at: tuple) -> dict[str, Any]:
    """The known keys of the section at a key path; empty where that is no section."""
    section: Any = Config
    for key in at:
        if isinstance(key, int):
            continue
        field = section.model_fields.get(key)
        args = getattr(field.annotation, "__args__", (field.annotation,)) if field else ()
        section = next((a for a in args if isinstance(a, type) and issubclass(a, Section)), None)
        if section is None:
            return {}
    return section.model_fields


def _describe(error: Any, places: dict[tuple, str], name: str) -> str:
    """One fault as `file:line: key: what is wrong and what mends it`."""
    at = tuple(error["loc"])
    place = next((places[at[:n]] for n in range(len(at), -1, -1) if at[:n] in places), name)
    key = ".".join(str(part)[:80] for part in at) or "config"
    if error["type"] == "extra_forbidden":
        here = key_hint(str(at[-1])) or did_you_mean(str(at[-1]), _fields(at[:-1]))
        return f"{place}: {key}: no such key{here}"
    if error["type"] == "missing":
        return f"{place}: {key}: must be given"
    if error["type"] == "value_error":
        return f"{place}: {key}: {error['ctx']['error']}"
    if error["type"] == "literal_error":
        word = error["input"]
        known = [w.strip(" '") for w in error["ctx"]["expected"].replace(" or ", ",").split(",")]
        return f"{place}: {key}: {shown(word)} is not one of {', '.join(known)}{did_you_mean(str(word), known, otherwise='')}"
    if error["type"] in ("model_type", "model_attributes_type"):
        return f"{place}: {key}: must be a section with the keys {', '.join(_fields(at))}"
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"{place}: {key}: {message}, not {shown(error['input'])}"
