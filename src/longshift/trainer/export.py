"""A run's checkpoint as a Hugging Face folder, or its adapters as a folder of PEFT."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from longshift.config import Config
from longshift.dist.world import World
from longshift.documents.template import FILE as TEMPLATE
from longshift.documents.template import ChatTemplate, read_template
from longshift.documents.template_process import TemplateProcess
from longshift.documents.tokenizer import Tokenizer
from longshift.errors import CheckpointError, UsageError
from longshift.files import read_json_object
from longshift.layout.box import Box
from longshift.model.huggingface import TOKEN_IDS, TOKENIZER_FILES, Carried, write_adapters, write_folder
from longshift.spec.adapters import A, B
from longshift.spec.config_json import CARRIED
from longshift.spec.formats import FORMATS, WeightFormat
from longshift.spec.model import ModelSpec, Param
from longshift.state.checkpoint import BEST, LATEST, Checkpoint
from longshift.state.home import Source
from longshift.state.precision import Precision
from longshift.trainer.build_run import continued
from longshift.trainer.corpus import open_tokenizer
from longshift.trainer.facts import Facts
from longshift.trainer.stages import stages_of


def export(config: Config, run: Path, to: Path, precision: WeightFormat | None = None, best: bool = False, merge: bool = False) -> None:
    """Write weights, config.json and the tokenizer that was trained with to the new folder `to`; of a run with adapters, these alone, as a
    folder of PEFT, unless they are to be added to the weights (`merge`). `best`: of the checkpoint with the lowest validation loss, else of
    the newest. `precision`: of the weights; that of the model folder that the run began with where not given, else float32, as adapters
    are. A model with rotary embedding has at least as many positions as the longest document that it was trained on. Raises
    CheckpointError, and UsageError where there is nothing to merge."""
    if merge and not config.spec.lora:
        raise UsageError(f"{run} trained without adapters: leave --merge out")
    saved = Checkpoint.latest(run, World.alone(), BEST if best else LATEST)
    tokenizer = open_tokenizer(config)
    if tokenizer.fingerprint != Facts.of(saved).fingerprints.tokenizer:
        raise CheckpointError(f"the tokenizer changed since {saved.folder} was written; an export with it would be useless")
    trained = [stage.config for stage in stages_of(config) if stage.begin < saved.step]
    spec, longest = trained[-1].spec, max(part.data.max_len for part in trained)
    if not spec.learned_positions:
        spec = replace(spec, max_positions=max(spec.max_positions, longest))
    source = read_json_object(Path(config.model.path) / "config.json") if config.model.path else {}
    kept = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16)}
    named = getattr(torch, FORMATS[precision].compute) if precision else None
    carried = _carried(config, trained, source, tokenizer)
    weights = _finite(continued(config, saved, Precision.of(config.train.precision).home), saved)
    if spec.lora and not merge:
        if config.model.path is None or config.model.init != "pretrained":
            raise CheckpointError(f"{run} trained adapters of weights that were drawn, which no folder holds: write --merge")
        adapters = ((p.name, weights(p.name, Box.whole(p.shape))) for p in spec.params if not p.frozen)
        write_adapters(to, spec, adapters, named or torch.float32, str(Path(config.model.path).resolve()), carried)
        return
    dtype = named or kept.get(source.get("dtype") or source.get("torch_dtype") or "", torch.float32)
    whole = ((p.name, _merged(spec, p, weights)) for p in spec.base.params)
    write_folder(to, spec.base, whole, dtype, carried)


def _finite(weights: Source, saved: Checkpoint) -> Source:
    """The same weights. Raises CheckpointError at the first that is not finite."""

    def read(name: str, box: Box) -> torch.Tensor:
        found = weights(name, box)
        if not found.isfinite().all():
            raise CheckpointError(f"{saved.folder}: the master of {name} is not finite. {saved.older}")
        return found

    return read


def _merged(spec: ModelSpec, p: Param, weights: Source) -> torch.Tensor:
    """A weight, with its adapter's part where it has one: W + scale B A, in at least float32."""
    found = weights(p.name, Box.whole(p.shape))
    a, b = (spec.by_name.get(p.name.removesuffix("weight") + end) for end in (A, B))
    if not (spec.lora and a and b):
        return found
    added = torch.mm(*(weights(one.name, Box.whole(one.shape)).double() for one in (b, a))) * spec.lora.scale
    return (found.double() + (added.mT if spec.fused_qkv else added)).to(torch.promote_types(found.dtype, torch.float32))


def _carried(config: Config, trained: Sequence[Config], source: Mapping[str, Any], tokenizer: Tokenizer) -> Carried:
    """The files beside the tokenizer, the model's settings of generation, and the chat template that was trained with. `trained`:
    configs of the stages; `source`: the config.json that the run began with."""
    beside = tokenizer.file.parent
    files = {name: beside / name for name in TOKENIZER_FILES if (beside / name).is_file()} | {"tokenizer.json": tokenizer.file}
    if config.model.path and (settings := Path(config.model.path) / "generation_config.json").is_file():
        files[settings.name] = settings
    template = _template(config, tokenizer)
    stops = [tokenizer.eos]
    if template is not None and any(part.format.is_masked for stage in trained for part in stage.data.train):
        with TemplateProcess(template) as process:
            end = tokenizer.core.token_to_id(process.turn_end() or tokenizer.end)
        stops += [] if end is None else [end]
    ids = {key: value for key, value in read_json_object(beside / "config.json").items() if key in TOKEN_IDS and value is not None}
    kept = {key: value for key, value in source.items() if key in CARRIED}
    return Carried(files, (tokenizer.end, tokenizer.eos), ids, tuple(dict.fromkeys(stops)), kept, template and template.source)


def _template(config: Config, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template that conversations are written by; None where there is none, or several that a tokenizer_config.json names."""
    given = Path(config.data.template) if config.data.template else None
    beside = read_json_object(tokenizer.file.parent / "tokenizer_config.json")
    if given is None and not (tokenizer.file.parent / TEMPLATE).exists() and not isinstance(beside.get("chat_template"), str):
        return None
    return read_template(given, tokenizer.file, tokenizer.special)
