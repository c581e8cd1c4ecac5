"""transformers as the reference: a model of its making and ours on the same documents.

[Note: float64 against transformers] Its RMS norms and its loss compute in float32 whatever the model's dtype; a float64 comparison
would then end at 1e-7. The norms are patched to stay in the model's dtype and the loss is taken from the logits. Its rotary angles are
formed in float32, ours in float64: what it calls float is patched to be float64. Its attention is SDPA: the eager one takes its softmax in
float32.
"""

import importlib
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from longshift.documents.batch import Document
from longshift.documents.micro import micro_batch
from longshift.layout.box import Box
from longshift.layout.layout import Layout
from longshift.model.decoder import Decoder, MicroBatch, Ops
from longshift.model.loss import IGNORE
from longshift.model.weight_folder import WeightFolder
from longshift.spec.families import read_spec
from longshift.spec.family_table import FAMILIES

LENGTHS = (37, 1, 53, 2)


@dataclass(frozen=True)
class Outcome:
    """Logits [T, V] of all documents end to end, the sum of their losses, gradients by canonical name."""

    logits: torch.Tensor
    loss: torch.Tensor
    grads: dict[str, torch.Tensor]


def random_model(config: PreTrainedConfig) -> Any:
    """A model of transformers with random weights, norms and biases away from one and zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    for weight in model.parameters():
        center, spread = (0.0, weight.shape[-1] ** -0.5) if weight.dim() > 1 else (1.0, 0.3)
        weight.data.normal_(center, spread, generator=generator)
    return model


def norm_that_keeps_its_dtype(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def gemma_norm_that_keeps_its_dtype(self: Any, x: torch.Tensor) -> torch.Tensor:
    return (1.0 + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def gemma_embedding_with_an_exact_scale(self: Any, ids: torch.Tensor) -> torch.Tensor:
    return F.embedding(ids, self.weight) * self.scalar_embed_scale


def documents() -> list[Document]:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 257, n) for n in LENGTHS]
    return [Document(ids, np.append(ids[1:], IGNORE)) for ids in texts]


def read_all(folder: Path, dtype=None) -> tuple:
    spec = read_spec(folder)
    weights = WeightFolder(folder, spec)
    return spec, {p.name: weights.read(p.name, Box.whole(p.shape)).to(dtype) for p in spec.params}


def decoder_logits(model: Decoder, micro: MicroBatch, ops: Ops) -> torch.Tensor:
    x = None
    for unit in model.units[:-1]:
        x = unit(x, micro, ops)
    return model.units[-1].logits(x, ops)  # pyright: ignore


def ours(folder: Path, dtype: torch.dtype, docs: list[Document]) -> Outcome:
    spec, tensors = read_all(folder, dtype)
    model, ops = Decoder(spec).load(tensors), Ops(spec)
    micro = micro_batch(spec, docs, Layout(), 0, dtype, torch.device("cpu"))
    loss = model(micro, ops)
    loss.backward()
    with torch.no_grad():
        logits = decoder_logits(model, micro, ops)
    return Outcome(logits, loss.detach(), gradients(model.weights().items()))


def theirs(folder: Path, dtype: torch.dtype, docs: list[Document]) -> Outcome:
    """transformers, one document at a time."""
    with ExitStack() as patches:
        patches.enter_context(patch.object(torch, "float", torch.float64))
        patches.enter_context(patch.object(torch.Tensor, "float", torch.Tensor.double))
        for name, family in FAMILIES.items():
            name = name.removesuffix("_text")
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
            norm = getattr(module, f"{family.architecture.removesuffix('ForCausalLM')}RMSNorm", None)
            if norm:
                replaced = gemma_norm_that_keeps_its_dtype if family.gemma else norm_that_keeps_its_dtype
                patches.enter_context(patch.object(norm, "forward", replaced))
            if family.gemma:
                embedding = getattr(module, f"{family.architecture.removesuffix('ForCausalLM')}TextScaledWordEmbedding")
                patches.enter_context(patch.object(embedding, "forward", gemma_embedding_with_an_exact_scale))
        if getattr(AutoConfig.from_pretrained(folder), "attn_logit_softcapping", None) is None:
            return _theirs(folder, dtype, docs, "sdpa")
        patches.enter_context(patch.object(F, "softmax", lambda x, dim, dtype: x.softmax(dim)))  # the eager one's is in float32
        return _theirs(folder, dtype, docs, "eager")


def _theirs(folder: Path, dtype: torch.dtype, docs: list[Document], attention: str) -> Outcome:
    kernels = {"attn_implementation": attention, "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **kernels).train()
    logits, total = [], torch.zeros((), dtype=dtype)
    for doc in docs:
        out = model(input_ids=torch.from_numpy(doc.ids)[None]).logits[0]
        total = total + F.cross_entropy(out, torch.from_numpy(doc.labels), ignore_index=IGNORE, reduction="sum")
        logits.append(out.detach())
    total.backward()
    return Outcome(torch.cat(logits), total.detach(), by_canonical_name(gradients(model.named_parameters()), model.config.model_type))


def by_canonical_name(grads: dict[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
    """Gradients as our parameter table has them: transformers keeps gate and up of all experts in one tensor [E, 2 F, D]."""
    canonical = {}
    for name, grad in grads.items():
        stem, _, fused = name.partition(".experts.")
        parts = [("", grad)]
        if fused == "gate_up_proj":
            parts = list(zip(("gate_proj", "up_proj"), grad.chunk(2, dim=1)))
        elif fused == "down_proj":
            parts = [("down_proj", grad)]
        for role, part in parts:
            renamed = f"{stem}.experts.{role}.weight" if fused else name
            if family == "mixtral":
                for theirs_name, ours_name in (("mlp", "block_sparse_moe"), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
                    renamed = renamed.replace(f".{theirs_name}.", f".{ours_name}.")
            canonical[renamed] = part.flatten(0, 1) if fused else part
    return canonical


def gradients(named: Iterable[tuple[str, torch.nn.Parameter]]) -> dict[str, torch.Tensor]:
    found = {name: weight.grad for name, weight in named}
    assert all(grad is not None for grad in found.values())
    return found  # pyright: ignore[reportReturnType]


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert b.norm() > 1e-6
    return float((a - b).norm() / b.norm())


def worst(mine: Outcome, reference: Outcome) -> dict[str, float]:
    assert mine.grads.keys() == reference.grads.keys()
    grads = {name: difference(mine.grads[name], grad) for name, grad in reference.grads.items()}
    return {"logits": difference(mine.logits, reference.logits), "loss": difference(mine.loss, reference.loss), **grads}
