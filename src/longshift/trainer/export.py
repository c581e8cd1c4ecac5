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
from longshift.model.write_folder import (
    TOKEN_IDS,
    TOKENIZER_FILES,
    FolderExtras,
    write_adapters,
    write_folder,
)
from longshift.spec.adapters import A, B
from longshift.spec.config_json import CARRIED
from longshift.spec.formats import FORMATS, WeightFormat
from longshift.spec.model import ModelSpec
from longshift.spec.param import Param
from longshift.state.checkpoint import BEST, LATEST, Checkpoint
from longshift.state.home import Source
from longshift.state.precision import Precision
from longshift.trainer.build_run import continued, stages_of
from longshift.trainer.corpus import open_tokenizer
from longshift.trainer.facts import Facts

# Types of a model folder that an export keeps.
HALF_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def export(
    config: Config,
    run: Path,
    to: Path,
    precision: WeightFormat | None = None,
    best: bool = False,
    merge: bool = False,
) -> None:
    """Write weights, config.json and the tokenizer that was trained with to the new folder `to`; of
    a run with adapters, these alone, as a folder of PEFT, unless they are to be added to the
    weights (`merge`). `best`: of the checkpoint with the lowest validation loss, else of the
    newest. `precision`: of the weights; that of the model folder that the run began with where not
    given, else float32, as adapters are. A model with rotary embedding has at least as many
    positions as the longest document that it was trained on. Raises CheckpointError, and UsageError
    where there is nothing to merge."""
    if merge and not config.spec.lora:
        raise UsageError(f"{run} trained without adapters: leave --merge out")
    saved = Checkpoint.latest(run, World.alone(), BEST if best else LATEST)
    tokenizer = open_tokenizer(config)
    if tokenizer.fingerprint != Facts.of(saved).fingerprints.tokenizer:
        raise CheckpointError(
            f"the tokenizer changed since {saved.folder} was written; an export with it would be"
            " useless"
        )
    trained = [stage.config for stage in stages_of(config) if stage.begin < saved.step]
    spec = trained[-1].spec
    longest = max(part.data.max_len for part in trained)
    if not spec.learned_positions:
        spec = replace(spec, max_positions=max(spec.max_positions, longest))
    source = read_json_object(Path(config.model.path) / "config.json") if config.model.path else {}
    requested_dtype = getattr(torch, FORMATS[precision].compute) if precision else None
    carried = _carried(config, trained, source, tokenizer)
    weights = _finite(continued(config, saved, Precision.of(config.train.precision).home), saved)
    if spec.lora and not merge:
        if config.model.path is None or config.model.init != "pretrained":
            raise CheckpointError(
                f"{run} trained adapters of weights that were drawn, which no folder holds: write"
                " --merge"
            )
        adapters = (
            (p.name, weights(p.name, Box.whole(p.shape))) for p in spec.params if not p.frozen
        )
        dtype = requested_dtype or torch.float32
        base_folder = str(Path(config.model.path).resolve())
        write_adapters(to, spec, adapters, dtype, base_folder, carried)
        return
    source_dtype = source.get("dtype") or source.get("torch_dtype") or ""
    dtype = requested_dtype or HALF_DTYPES.get(source_dtype, torch.float32)
    # Made one at a time: a second copy of all weights may not fit.
    tensors = ((p.name, _merged_weight(spec, p, weights)) for p in spec.base.params)
    write_folder(to, spec.base, tensors, dtype, carried)


def _finite(weights: Source, saved: Checkpoint) -> Source:
    """The same weights. Raises CheckpointError at the first that is not finite."""

    def read(name: str, box: Box) -> torch.Tensor:
        weight = weights(name, box)
        if not weight.isfinite().all():
            raise CheckpointError(
                f"{saved.folder}: the master of {name} is not finite. {saved.older}"
            )
        return weight

    return read


def _merged_weight(spec: ModelSpec, p: Param, weights: Source) -> torch.Tensor:
    """A weight, with its adapter's part where it has one: W + scale B A, in at least float32."""
    weight = weights(p.name, Box.whole(p.shape))
    stem = p.name.removesuffix("weight")
    a_param = spec.by_name.get(stem + A)
    b_param = spec.by_name.get(stem + B)
    if not (spec.lora and a_param and b_param):
        return weight

    # Computed in float64, so that the weight is rounded once.
    b = weights(b_param.name, Box.whole(b_param.shape)).double()
    a = weights(a_param.name, Box.whole(a_param.shape)).double()
    update = torch.mm(b, a) * spec.lora.scale
    merged = weight.double() + (update.mT if spec.fused_qkv else update)
    return merged.to(torch.promote_types(weight.dtype, torch.float32))


def _carried(
    config: Config, trained: Sequence[Config], source: Mapping[str, Any], tokenizer: Tokenizer
) -> FolderExtras:
    """The files beside the tokenizer, the model's settings of generation, and the chat template
    that was trained with. `trained`: configs of the stages; `source`: the config.json that the run
    began with."""
    # 1. Files.
    folder = tokenizer.file.parent
    files = {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
    files["tokenizer.json"] = tokenizer.file
    if config.model.path:
        settings = Path(config.model.path) / "generation_config.json"
        if settings.is_file():
            files[settings.name] = settings

    # 2. Tokens at which generation stops. A model that was trained on turns ends its own.
    template = _template(config, tokenizer)
    stops = [tokenizer.eos]
    has_turns = any(part.may_be_masked for stage in trained for part in stage.data.train)
    if template is not None and has_turns:
        with TemplateProcess(template) as process:
            end = tokenizer.core.token_to_id(process.turn_end() or tokenizer.end)
        if end is not None:
            stops.append(end)

    # 3. Fields of config.json.
    tokenizer_config = read_json_object(folder / "config.json")
    ids = {
        key: value
        for key, value in tokenizer_config.items()
        if key in TOKEN_IDS and value is not None
    }
    fields = {key: value for key, value in source.items() if key in CARRIED}
    return FolderExtras(
        files,
        (tokenizer.end, tokenizer.eos),
        ids,
        tuple(dict.fromkeys(stops)),
        fields,
        template and template.source,
    )


def _template(config: Config, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template that conversations are written by; None where there is none, or several that a
    tokenizer_config.json names."""
    file = Path(config.data.template) if config.data.template else None
    folder = tokenizer.file.parent
    tokenizer_config = read_json_object(folder / "tokenizer_config.json")
    has_template = (folder / TEMPLATE).exists() or isinstance(
        tokenizer_config.get("chat_template"), str
    )
    if file is None and not has_template:
        return None
    return read_template(file, tokenizer.file, tokenizer.special)
