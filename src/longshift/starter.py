"""The commented config that `longshift init` writes."""

import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from longshift.config_parts import PROJECT_VOCAB
from longshift.errors import UsageError
from longshift.layout.layout import format_size
from longshift.spec.families import preset, read_spec

TEMPLATE = """\
# A run of Longshift. Check it with `longshift data`, start it with `longshift train`; any key can be changed on the command line,
# as in `train.lr=1e-4`. Sizes take K, M and G (binary: 4K is 4096). Paths start at the working directory.

{notes}model: {model}
# model: {{preset: tiny-llama}}            a preset, from scratch
# model: {{path: ./Qwen3-0.6B}}            a Hugging Face folder on this machine; init: scratch leaves its weights out

data:
  train:{sources}
  # - {{path: "books/*.jsonl"}}              files (jsonl, parquet, txt; books/**/*: all under a folder), or a saved Hugging Face dataset
  # - {{corpus: python}}                   the sources of the installed standard library
  {tokenizer}
  max_len: {max_len}                            # longest document, in tokens
  overlong: split                        # what happens to longer ones: split | truncate | drop

train:
  tokens_per_step: {tokens_per_step}                   # whole documents are taken until this is reached
  steps: 100
  lr: {lr}
  warmup: 10
  schedule: cosine                       # cosine | linear | constant; ends at min_lr, a tenth of lr
  clip: 1.0
  precision: {precision}                     # float32 | bf16 | fp16 | float64 | float8
  seed: 0

layout: {layout}                            # dp: replicas, tp: tensor, pp: pipeline, u and ring: sequence; z1 to z3: sharded state
# layout:                                # or by length: the layout changes inside every step
#   - {{upto: {short}, use: dp2, pack: {max_len}}}   # in packs of up to so many tokens, of upto if not given
#   - {{upto: {max_len}, use: tp2}}

save: {{dir: {run}, every: 50, keep: 3}}
"""  # noqa: E501


def starter(model: str, data: Sequence[str]) -> str:
    """A config for a preset or a model folder, and data files (none: the standard library's
    sources). Raises UsageError for a model that does not exist or is not supported."""
    is_folder = _is_folder(model)
    sources = [_mapping(path=_files(path)) for path in data] or [_mapping(corpus="python")]
    spec = read_spec(Path(model)) if is_folder else preset(model)
    longest = min(4096, spec.max_positions)
    if is_folder:
        tokenizer = f"{f'tokenizer: {_scalar(model)}':<38} # the model folder's own"
    else:
        tokenizer = (
            f"{'# tokenizer: ./tokenizer.json':<38} or a folder that holds one; see above for what"
            " is taken without"
        )
    return TEMPLATE.format(
        notes="".join(f"{_comment(note)}\n" for note in notes(model)) + "\n",
        model=_mapping(path=model) if is_folder else _mapping(preset=model),
        tokenizer=tokenizer,
        sources="".join(f"\n    - {source}" for source in sources),
        max_len=format_size(longest),
        short=format_size(longest // 4),
        tokens_per_step="64K" if is_folder else "16K",
        lr="2e-5" if is_folder else "3e-3",
        precision="bf16" if is_folder else "float32",
        layout="dp1" if is_folder else "dp2",
        run=_scalar(f"runs/{Path(model).resolve().name if is_folder else model}"),
    )


def notes(model: str) -> tuple[str, ...]:
    """What a person should know of the weights, and of the tokenizer, that a starter chooses.
    Raises UsageError as `starter`."""
    if not _is_folder(model):
        spec = preset(model)
        # The project's tokenizer has no more tokens than the model has rows of its embedding.
        vocab = min(PROJECT_VOCAB, spec.vocab)
        rows = (
            f", and the other {spec.vocab - vocab:,} rows of the embedding are not trained"
            if vocab < spec.vocab
            else ""
        )
        return (
            (
                f"the weights of {model} are random: a preset is a model's shape, without its"
                " weights. To go on with published ones, name their folder"
            ),
            (
                f"the tokenizer has {vocab:,} tokens and is trained on the standard library's"
                f" Python sources, since a preset has none{rows}. For other texts, name one in"
                " data.tokenizer"
            ),
        )
    folder = Path(model)
    spec = read_spec(folder)
    if any(folder.glob("*.safetensors")):
        weights = f"training begins with the weights of {model}"
    else:
        weights = f"{model} holds no weights in *.safetensors: add them, or write init: scratch"
    if (folder / "tokenizer.json").exists():
        tokenizer = f"the tokenizer is that of {model}, by which its weights were trained"
    else:
        tokenizer = (
            f"{model} holds no tokenizer.json: name one of at most {spec.vocab:,} tokens in"
            " data.tokenizer"
        )
    return (weights, tokenizer)


def _comment(note: str) -> str:
    """A note as lines of comment."""
    return textwrap.fill(
        f"{note[0].upper()}{note[1:]}.",
        132,
        initial_indent="# ",
        subsequent_indent="# ",
        break_on_hyphens=False,
    )


def _is_folder(model: str) -> bool:
    """Whether a name is that of a folder, and not of a preset."""
    return Path(model).is_dir() or "/" in model or model.startswith(".")


def write_new(text: str, to: Path) -> None:
    """Write a file that is not there yet. Raises UsageError."""
    try:
        # Never over a file that somebody has written.
        with to.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{to} exists already; choose another name with --to") from None
    except OSError as fault:
        raise UsageError(f"{to} cannot be written: {fault.strerror}") from None


def _files(path: str) -> str:
    """A pattern for all under a folder, unless `datasets` has saved it."""
    folder = Path(path)
    is_dataset = any((folder / name).exists() for name in ("state.json", "dataset_dict.json"))
    return f"{path.rstrip('/')}/**/*" if folder.is_dir() and not is_dataset else path


def _mapping(**field: str) -> str:
    """One pair as YAML in braces; a value that YAML could read as something else is quoted."""
    [(key, value)] = field.items()
    return f"{{{key}: {_scalar(value)}}}"


def _scalar(value: str) -> str:
    """A value as YAML, quoted where it could be read as something else."""
    return value if re.fullmatch(r"[A-Za-z./][\w./-]*", value) else json.dumps(value)
