"""Low-rank adapters, and weights that are not trained.

Paper: LoRA (arXiv 2106.09685). The weight W [out, in] of a linear layer stays as it is; A [rank,
in] and B [out, rank] beside it are trained:

    y = x W^T + (alpha / rank) (x A^T) B^T
    A drawn with the variance 1 / (3 in), as PEFT draws it; B zeros

Sharding follows W's. Where tensor parallelism cuts W by output, B is cut likewise and every rank
has all of A; where it cuts W by input, A is cut and every rank has all of B. What a rank has whole
is there in every rank's part of the sum, so that its gradient is a partial sum as a norm's is.

    by output   x ─┬─ W[out_t, in] ────────────────── + ─ y[out_t]
                   └─ A[rank, in] ─ B[out_t, rank] ───┘
    by input    x[in_t] ─┬─ W[out, in_t] ──────────────── + ─ partial y
                         └─ A[rank, in_t] ─ B[out, rank] ─┘

Names are those of PEFT, less its prefix: `model.layers.0.self_attn.q_proj.lora_A.weight`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from longshift.errors import UsageError, sort_by_likeness

ALL = "all"
A = "lora_A.weight"
B = "lora_B.weight"
# Keys of PEFT's adapter_config.json: other functions than W x + scale B A x where they are set.
FOREIGN = (
    "use_rslora",
    "use_dora",
    "use_qalora",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
)
# Ways to draw adapters that take from the weights beside them.
CHANGING = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True)
class Lora:
    """Adapters of all linear layers of the blocks that `targets` names by the last part of their
    module's name, `q_proj`; ("all",): of every one."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = (ALL,)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def module_of(name: str) -> str:
    """The last part of the name of the module that has a weight: `q_proj`."""
    return name.split(".")[-2]


def linear_modules(params: Iterable[Any], layers: int) -> tuple[str, ...]:
    """Names of the linear layers of a model's blocks, each once."""
    return tuple(dict.fromkeys(module_of(p.name) for p in params if _adaptable(p, layers)))


def partly_trained(spec: Any, lora: Lora | None, freeze: tuple[str, ...]) -> Any:
    """The model with adapters, or with some weights that are not trained. Raises UsageError for a
    name that the model does not have."""
    if not lora and not freeze:
        return spec
    if lora:
        # A misspelt name would leave its layer without an adapter, and nobody would notice.
        modules = linear_modules(spec.params, spec.layers)
        for name in lora.targets:
            if name not in (ALL, *modules):
                raise UsageError(
                    f"lora.targets: no linear layer of this model is called {name!r}: it has"
                    f" {', '.join(modules)}"
                )
        if not lora.targets:
            raise UsageError(
                f"lora.targets is empty: name some of {', '.join(modules)}, or write all"
            )
    for pattern in freeze:
        if not any(fnmatchcase(p.name, pattern) for p in spec.params):
            # Blocks have the same weights, so the first of each role stands for all.
            first_names: dict[str, str] = {}
            for p in spec.params:
                first_names.setdefault(p.role, p.name)
            word = pattern.replace("*", "").strip(".")
            examples = ", ".join(sort_by_likeness(word, first_names.values()))
            raise UsageError(
                f"freeze: no weight of this model matches {pattern!r}; its weights, the most alike"
                f" first: {examples}; all blocks have the same"
            )
    adapted_spec = replace(spec, lora=lora, freeze=freeze)
    if not adapted_spec.learned:
        raise UsageError("freeze: every weight of the model matches, nothing would be trained")
    return adapted_spec


def adapter_faults(config: Mapping[str, Any], spec: Any) -> list[str]:
    """Why the adapters that an `adapter_config.json` of PEFT describes are not those of a model, a
    line each: another kind, size or scale, or a function that is not `W x + scale B A x`. Which
    layers have one, the names of tensors say."""
    peft_type = config.get("peft_type")
    if peft_type != "LORA":
        return [f"peft_type is {peft_type!r}, not LORA"]
    # Only what changes what adapters compute is compared, no bookkeeping.
    lora = spec.lora
    faults: list[str] = []
    rank = config.get("r")
    alpha = config.get("lora_alpha")
    if rank != lora.rank:
        faults.append(f"r is {rank!r}, and model.lora.rank is {lora.rank}")
    if alpha != lora.alpha:
        faults.append(f"lora_alpha is {alpha!r}, and model.lora.alpha is {lora.alpha:g}")
    if config.get("bias", "none") != "none":
        faults.append(f"bias is {config['bias']!r}: biases are not trained here")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().split("_")[0] in CHANGING:
        faults.append(
            f"init_lora_weights is {init!r}: PEFT changed the model's own weights beside these"
            " adapters"
        )
    for key in FOREIGN:
        if config.get(key):
            faults.append(f"{key} is {config[key]!r}, which is not there")
    return faults


def with_adapters(
    params: Iterable[Any],
    layers: int,
    lora: Lora | None,
    freeze: tuple[str, ...],
    input_major: bool,
) -> Iterator[Any]:
    """The parameter table with adapters, each behind its weight, and with what is not trained
    marked: all but the adapters where there are any, and the weights whose names match a pattern of
    `freeze`. `input_major`: weights are stored [in, out]."""
    input_dim, output_dim = (0, 1) if input_major else (1, 0)
    for p in params:
        is_frozen = lora is not None or any(fnmatchcase(p.name, pattern) for pattern in freeze)
        yield replace(p, frozen=True) if is_frozen else p
        if not lora or not _adaptable(p, layers):
            continue
        if ALL not in lora.targets and module_of(p.name) not in lora.targets:
            continue

        stem = p.name.removesuffix("weight")
        a = replace(
            p,
            name=stem + A,
            role=f"{p.role}_lora_a",
            shape=(lora.rank, p.shape[input_dim]),
            init="fan_in",
        )
        b = replace(
            p,
            name=stem + B,
            role=f"{p.role}_lora_b",
            shape=(p.shape[output_dim], lora.rank),
            init="zeros",
        )

        # Tensor parallelism cuts the one beside its own cut: A by input, B by output.
        yield replace(a, dim=1) if p.dim == input_dim else replace(a, dim=None, parts=())
        yield replace(b, dim=0) if p.dim == output_dim else replace(b, dim=None, parts=())


def _adaptable(p: Any, layers: int) -> bool:
    """Whether a weight is the matrix of a linear layer of a block."""
    # PEFT takes neither routers nor experts for linear layers.
    is_linear = len(p.shape) == 2 and not p.experts and p.role != "router"
    return is_linear and 1 <= p.unit <= layers
