"""The parts of a config that say what is trained on what: values as they are written, the model,
the data."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    model_validator,
)

from longshift.errors import UsageError, did_you_mean, shown
from longshift.files import absolute
from longshift.layout.auto_layout import AutoLayout
from longshift.layout.home_tiers import HomeTiers
from longshift.layout.layout import MOST_SIZE, Layout, parse_size
from longshift.spec.adapters import Lora, partly_trained
from longshift.spec.families import preset, read_spec
from longshift.spec.model import ModelSpec
from longshift.spec.positions import Stretch
from longshift.user_code import is_object, split_object
from longshift.workload.groups import Edge, parse_edges
from longshift.workload.lengths import Overlong


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
    raise ValueError(
        "auto, one layout such as dp2.tp2, or groups of lengths, such as [{upto: 4K, use: dp4},"
        " {upto: 32K, use: u4}]"
    )


def _parse_home(value: object) -> HomeTiers:
    # A ValueError becomes one of the config's faults; any other error would be the only one.
    try:
        return HomeTiers.parse(value)
    except UsageError as fault:
        raise ValueError(str(fault)) from None


def layout_out(value: "Layout | tuple[Edge, ...] | AutoLayout") -> object:
    """A layout, groups or a choice as a config has them."""
    if isinstance(value, Layout):
        return str(value)
    if isinstance(value, AutoLayout):
        return value.to_json()
    return [edge.told() for edge in value]


def _absolute(value: object) -> object:
    return absolute(value) if isinstance(value, str) and value else value


def name_or_object(*names: str) -> AfterValidator:
    """Accepts these names, and the import path of an object of the user's own (`user_code`).
    Any other text raises ValueError."""

    def check(value: str) -> str:
        if value in names:
            return value
        if names and not is_object(value):
            near = did_you_mean(value, names, otherwise="")
            raise ValueError(
                f"{shown(value)} is not one of"
                f" {', '.join(names)}{near or ', nor package.module:name of your own code'}"
            )
        split_object(value)
        return value

    return AfterValidator(check)


def _number(value: object) -> object:
    # Pydantic takes true as 1.0, and YAML reads yes and on as true.
    if isinstance(value, bool):
        raise ValueError(f"a number is needed, and YAML reads this as {str(value).lower()}")
    return value


def some_sources(value: object) -> object:
    """The value as a list of sources, if it is no empty one: a source may stand alone, and a text
    is a path. Raises ValueError."""
    sources = [value] if isinstance(value, str | Mapping) else value
    if sources in ([], ()):
        raise ValueError("name at least one source, as in train: [{corpus: python}]")
    if not isinstance(sources, list | tuple):
        return sources
    return [{"path": source} if isinstance(source, str) else source for source in sources]


# Tokens of the project's own tokenizer, which is taken where no other is named.
PROJECT_VOCAB = 4096
Decay = Literal["cosine", "linear", "constant"]
Learn = Literal["assistant", "last", "all"]
Kind = Literal["text", "messages", "prompt"]  # of documents
Size = Annotated[int, BeforeValidator(parse_size), Field(ge=1, le=MOST_SIZE, strict=True)]
Number = Annotated[float, BeforeValidator(_number)]
# Four months; clocks of collectives take no centuries.
Seconds = Annotated[Number, Field(gt=0, le=1e7)]
Rate = Annotated[Number, Field(le=1e6)]  # a step by more leaves fp32
Count = Annotated[int, BeforeValidator(parse_size), Field(ge=0, le=MOST_SIZE, strict=True)]
PathText = Annotated[str, BeforeValidator(_absolute), Field(min_length=1)]
ObjectText = Annotated[str, name_or_object()]
HomeAt = Annotated[HomeTiers, PlainValidator(_parse_home), PlainSerializer(HomeTiers.to_json)]
Layouts = Annotated[
    Layout | tuple[Edge, ...] | AutoLayout,
    PlainValidator(_parse_layout),
    PlainSerializer(layout_out),
]


class Section(BaseModel):
    """A part of the config: frozen, and a key that it does not know is a fault."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RopeConfig(Section):
    """Another rotary embedding than the model's, for documents longer than it was trained on
    (`spec.positions`)."""

    type: Stretch = Field(description="how the rotary embedding is stretched")
    factor: Annotated[Number, Field(ge=1, le=1e6)] | None = Field(
        None,
        description=(
            "how many times as long; data.max_len over the trained positions where it is not given"
        ),
    )
    theta: Annotated[Number, Field(gt=1, le=1e15)] | None = Field(
        None, description="the new base of the angles, of type theta"
    )
    trained: Size | None = Field(
        None, description="positions that the model was trained on, where config.json says others"
    )


class LoraConfig(Section):
    """Low-rank adapters beside weights that stay as they are (`spec.adapters`)."""

    rank: Annotated[int, Field(ge=1, le=65536)] = Field(16, description="width of the adapters")
    alpha: Annotated[Number, Field(gt=0, le=1e6)] = Field(
        32.0, description="adapters are scaled by alpha / rank"
    )
    targets: Literal["all"] | tuple[str, ...] = Field(
        "all",
        description=(
            "the linear layers that have an adapter: all, or names such as [q_proj, v_proj]"
        ),
    )
    init_from: PathText | None = Field(
        None,
        description=(
            "a PEFT folder with the adapters to begin with; they are drawn where it is not given"
        ),
    )

    @property
    def adapters(self) -> Lora:
        return Lora(
            self.rank,
            self.alpha,
            (self.targets,) if isinstance(self.targets, str) else self.targets,
        )


class ModelConfig(Section):
    """Which model: a preset of Longshift, or a Hugging Face folder."""

    preset: str | None = Field(
        None, description="a model of Longshift's own, such as tiny-llama, with random weights"
    )
    rope: RopeConfig | None = Field(
        None, description="another rotary embedding, for longer documents"
    )
    lora: LoraConfig | None = Field(None, description="train low-rank adapters alone")
    freeze: tuple[str, ...] = Field(
        (),
        description=(
            'patterns of weights that are not trained, as in ["model.embed_tokens.*",'
            ' "model.layers.[0-7].*"]'
        ),
    )
    path: PathText | None = Field(None, description="a Hugging Face folder on this machine")
    init: Literal["pretrained", "scratch"] = Field(
        default_factory=lambda data: "pretrained" if data.get("path") else "scratch",
        description=(
            "pretrained: the weights of path; scratch: random ones, which a preset always has"
        ),
    )

    @model_validator(mode="after")
    def _one_of(self) -> "ModelConfig":
        if (self.preset is None) == (self.path is None):
            raise ValueError(
                "name exactly one of preset and path, as in model: {preset: tiny-llama}"
            )
        if self.preset is not None and self.init == "pretrained":
            raise ValueError(
                "a preset has no pretrained weights; leave init out, or give a model path"
            )
        if self.lora and self.freeze:
            raise ValueError("lora trains its adapters alone: leave freeze out")
        # Read now, so that a folder that cannot be read is a fault with its line.
        try:
            _ = self.spec
        except UsageError as fault:
            raise ValueError(str(fault)) from None
        return self

    @cached_property
    def spec(self) -> ModelSpec:
        """The model in numbers."""
        base = preset(self.preset or "") if self.path is None else read_spec(Path(self.path))
        return partly_trained(base, self.lora.adapters if self.lora else None, self.freeze)


@dataclass(frozen=True)
class DocumentFormat:
    """What makes a document: a `text`; a conversation, in `messages`; or a `prompt` and its
    completion, two texts or two lists of messages. `fields`: names of the fields of a record that
    hold it. A text may have none: it is the field `text` of a record, or a whole file."""

    kind: Kind = "text"
    fields: tuple[str, ...] = ()
    # By kind, what its fields are called in a config.
    KEYS: ClassVar[Mapping[Kind, tuple[str, ...]]] = {
        "text": ("text",),
        "messages": ("messages",),
        "prompt": ("prompt", "completion"),
    }

    @classmethod
    def parse(cls, value: object) -> "DocumentFormat":
        """The format that a config names, by a word or by its fields. Raises ValueError."""
        if isinstance(value, DocumentFormat):
            return value
        if value == "text":
            return cls()
        fields = {"messages": "messages"} if value == "messages" else value
        if isinstance(fields, Mapping) and all(
            name and isinstance(name, str) for name in fields.values()
        ):
            for kind, keys in cls.KEYS.items():
                if fields.keys() == set(keys):
                    return cls(kind, tuple(fields[key] for key in keys))
        raise ValueError(
            "text or messages, or names of fields: {text: body}, {messages: chat} or {prompt:"
            " question, completion: answer}"
        )

    def to_json(self) -> str | dict[str, str]:
        return dict(zip(self.KEYS[self.kind], self.fields)) if self.fields else self.kind

    @property
    def is_masked(self) -> bool:
        """Whether some tokens are no targets."""
        return self.kind != "text"


class Source(Section):
    """Where documents come from."""

    path: PathText | None = Field(
        default=None, description="a file, a folder or a pattern such as books/*.txt"
    )
    corpus: Literal["python"] | None = Field(
        default=None, description="python: the sources of the installed standard library"
    )
    python: ObjectText | None = Field(
        default=None,
        description=(
            "a function of yours that returns documents, as in my_module:documents"
            " (docs/extending.md)"
        ),
    )
    format: Annotated[
        DocumentFormat,
        PlainValidator(DocumentFormat.parse),
        PlainSerializer(DocumentFormat.to_json),
    ] = Field(
        default=DocumentFormat(),
        description=(
            "what makes a document: text, messages, or fields, as in {text: body} or {prompt:"
            " question, completion: answer}"
        ),
    )
    learn: Learn = Field(
        default="assistant",
        description=(
            "which tokens of a conversation count in the loss: the assistant's, its last turn's,"
            " or all"
        ),
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Source":
        if [self.path, self.corpus, self.python].count(None) != 2:
            raise ValueError(
                "name exactly one of path, corpus and python, as in {path: books/*.parquet},"
                " {corpus: python} or {python: my_module:documents}"
            )
        if self.path is None and self.format != DocumentFormat():
            raise ValueError(
                "format is of files that path names: leave it out for a corpus, and for a function"
            )
        if self.learn != "assistant" and not self.may_be_masked:
            raise ValueError(
                "learn is for messages, or prompt and completion; every token of a text is learned"
            )
        if self.learn == "last" and self.format.kind == "prompt":
            raise ValueError(
                "learn: last is for messages; of prompt and completion, the completion is learned"
            )
        return self

    @property
    def name(self) -> str:
        """What a person calls it by."""
        return self.path or self.python or self.corpus or ""

    @property
    def may_be_masked(self) -> bool:
        """Whether some tokens may be no targets: what a function returns is known when it is
        called."""
        return self.format.is_masked or self.python is not None


class TrainSource(Source):
    """A source that is trained on."""

    epochs: Annotated[Number, Field(gt=0, le=1e6)] | None = Field(
        None, description="how many times the source is read while others are read once"
    )
    weight: Annotated[Number, Field(gt=0, le=1e6)] | None = Field(
        None, description="the source's share of the tokens; every source has one, or none"
    )

    @model_validator(mode="after")
    def _epochs_or_weight(self) -> "TrainSource":
        if self.epochs is not None and self.weight is not None:
            raise ValueError("name one of epochs and weight")
        return self


LongestDocument = Annotated[Size, Field(ge=2)]
TrainSources = Annotated[tuple[TrainSource, ...], BeforeValidator(some_sources)]


class DataConfig(Section):
    """Documents and how they become tokens."""

    train: TrainSources = Field(
        description=(
            "the sources that are trained on: one, or a list; a path alone is short for {path: ...}"
        )
    )
    tokenizer: PathText | None = Field(
        None,
        description=(
            "a tokenizer.json or a folder with one; the model folder's own, or a small one of"
            " Python sources for a preset"
        ),
    )
    template: PathText | None = Field(
        None, description="a file with a chat template; the tokenizer's own where it is not given"
    )
    valid: Annotated[tuple[Source, ...], BeforeValidator(some_sources)] | None = Field(
        None, description="sources of documents to validate on"
    )
    held_out: Annotated[Number, Field(gt=0, le=0.5)] | None = Field(
        None, description="share of the documents of train to validate on"
    )
    max_len: LongestDocument = Field(description="tokens of the longest document")
    overlong: Overlong | None = Field(
        None, description="what happens to a longer document; required as soon as there is one"
    )
    cache: PathText = Field(
        "~/.cache/longshift",
        validate_default=True,
        description="folder of the token caches, and of tokenizers that Longshift trained",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "DataConfig":
        if self.valid is not None and self.held_out is not None:
            raise ValueError(
                "name one of valid, documents of their own, and held_out, a share of train's"
            )
        weighed = [source.weight is not None for source in self.train]
        if any(weighed) and not (all(weighed) and len(weighed) > 1):
            raise ValueError(
                "weight is a share of the tokens: every source of several needs one, or none;"
                " epochs needs no other"
            )
        if self.tokenizer is not None and not Path(self.tokenizer).exists():
            raise ValueError(
                f"tokenizer {self.tokenizer} does not exist; it is a tokenizer.json or a folder"
                " that holds one"
            )
        return self
