"""What a terminal shows of a run before its first step: model, data, layout and why, memory, run folder, how to go on. Needs no torch.

    longshift 0.1.0
    config  examples/quickstart.yaml
    model   tiny-llama: 1.79M parameters, 4 blocks of width 128, 4,096 tokens; random weights, from seed 0;
            a tokenizer of 4,096 tokens of Python sources
    data    1,758 documents, 9,478,507 tokens; the longest has 197,309, and documents of more than 1K are split
            to 1K     36.9%  ██████████████████████████████
    ...
    layout  documents to 512: dp4; documents to 1K: dp2.tp2, 4 ranks
    run     runs/quickstart: 80 steps of 8K tokens
    resume  longshift train runs/quickstart/config.yaml --resume
    memory  at most 60 MiB of tensors on rank 0, besides about 0.4 GiB of the process; there are 5.9 GiB for a rank

Everything here is also elsewhere, for programs: `longshift data --json`, `longshift train --explain --json`, plan.json, config.yaml.
"""

import os
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from longshift.config import Config
from longshift.config_parts import PROJECT_VOCAB
from longshift.explain import shape_of
from longshift.layout.layout import format_size
from longshift.program.needs import most, needs
from longshift.train.plan_file import PlanFile
from longshift.train.run_folder import RunFolder
from longshift.workload.lengths import Bin, histogram

LABEL = 8  # columns of a line's name
ROWS = 8  # of lengths
BAR = 30  # columns of the longest bar
PROCESS = "0.4 GiB"  # of a rank on a CPU that has torch and its peers, and no numbers


class Header:
    """Lines on a terminal, each as soon as it is known. Mutable: the console."""

    def __init__(self, console: Console, shown: bool):
        self._console, self.shown = console, shown

    def begin(self, run: Config, file: Path) -> None:
        """What the config alone says."""
        with suppress(PackageNotFoundError):  # of a source tree that is not installed
            self._print([f"longshift {version('longshift')}"])
        self._print([*labelled("config", str(file)), *labelled("model", model_told(run))])

    def data(self, run: Config, lengths: np.ndarray) -> None:
        self._print([*labelled("data", data_told(run, lengths)), *length_rows(lengths)])

    def layout(self, run: Config, plan: PlanFile | None) -> None:
        self._print(labelled("layout", layout_told(run, plan)))

    def memory(self, run: Config, per_node: int, room_bytes: int, gpus: bool) -> None:
        self._print([*labelled("memory", memory_told(run, per_node, room_bytes, gpus)), ""])

    def folder(self, run: Config, folder: RunFolder, resume: bool) -> None:
        steps = f"{run.train.steps:,} steps of {format_size(run.train.tokens_per_step)} tokens"
        steps += f", of which {folder.steps_done():,} are done" if resume else ""
        self._print([*labelled("run", f"{folder.shown}: {steps}"), *labelled("resume", folder.resume_command)])

    def _print(self, lines: Sequence[str]) -> None:
        if self.shown:
            for line in lines:
                wrapped = textwrap.wrap(line, self._console.width, subsequent_indent=" " * LABEL, break_on_hyphens=False) or [""]
                self._console.print(Text("\n".join(wrapped)), soft_wrap=True)


def labelled(name: str, text: str) -> list[str]:
    return [f"{name:<{LABEL}}{text}"]


def model_told(run: Config) -> str:
    """The model, its size, and where its weights and its tokenizer come from."""
    spec, model = run.spec, run.model
    named = run.data.tokenizer or model.path
    own = f"a tokenizer of {min(PROJECT_VOCAB, spec.vocab):,} tokens of Python sources"
    tokenizer = f"tokenizer of {shown_path(named)}" if named else own
    name = model.preset or Path(model.path or "").name
    origin = f"weights of {shown_path(model.path or '')}" if model.init == "pretrained" else f"random weights, from seed {run.train.seed}"
    size = f"{_count(spec.parameters)} parameters, {spec.layers} blocks of width {spec.width}, {spec.vocab:,} tokens"
    return f"{name}: {size}; {origin}; {tokenizer}"


def shown_path(path: str) -> str:
    """A path as a person would type it from here."""
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path


def data_told(run: Config, lengths: np.ndarray) -> str:
    """How many documents and tokens there are, and what becomes of the longest."""
    longest = int(lengths.max()) if len(lengths) else 0
    text = f"{len(lengths):,} documents, {int(lengths.sum()):,} tokens; the longest has {longest:,}"
    limit = run.data.max_len
    return text + (f", and documents of more than {format_size(limit)} are {CUT[run.data.overlong]}" if longest > limit else "")


CUT = {"split": "split", "truncate": "truncated", "drop": "dropped", None: "refused: write data.overlong"}


def length_rows(lengths: np.ndarray) -> Iterator[str]:
    """A small histogram of the documents by length; the outermost share a row where there are many."""
    bins = list(histogram(lengths))
    while len(bins) > ROWS:
        at = 0 if bins[0].documents <= bins[-1].documents else len(bins) - 2
        few, many = bins[at : at + 2]
        bins[at : at + 2] = [Bin(few.low, many.high, few.documents + many.documents, few.tokens + many.tokens)]
    most_documents = max((bin.documents for bin in bins), default=0)
    for bin in bins:
        bar = "█" * round(BAR * bin.documents / most_documents)
        yield f"{'':<{LABEL}}to {format_size(bin.high):<5} {bin.documents / len(lengths):6.1%}  {bar}".rstrip()


def layout_told(run: Config, plan: PlanFile | None) -> str:
    """The layout of every length and, where a plan has chosen it, why."""
    ranks = f"{run.world} rank{'s' * (run.world > 1)}"
    parts = [f"documents to {format_size(edge.upto)}: {edge.use}" for edge in run.edges]
    text = f"{parts[0].rpartition(': ')[2] if len(parts) == 1 else '; '.join(parts)}, {ranks}"
    if len(run.parts) > 1:
        text += f", in the first of {len(run.parts)} stages"
    return text + (f"; {why(plan)}" if plan else "")


def why(plan: PlanFile) -> str:
    """Why the planner chose a layout, in a sentence."""
    facts = plan.facts or {}
    best, compared = facts.get("best") or {}, facts.get("candidates")
    if plan.chosen is not None and len(plan.choices) > 1:
        return f"layout: auto trained {len(plan.choices)} choices, and this was the fastest"
    reason = (
        f"layout: auto compared {compared:,} and predicts {best['seconds']:.3g} s a step" if compared and best else "layout: auto chose it"
    )
    if rivals := facts.get("rivals"):
        reason += f", the next takes {rivals[0]['times']:.2f} times as long"
    trials = f"; the best {len(plan.choices)} are trained a few steps each, and the fastest goes on" if plan.chosen is None else ""
    return reason + trials


def memory_told(run: Config, per_node: int, room_bytes: int, gpus: bool) -> str:
    """What the rank that needs most needs in the largest step of any stage, and what there is for it."""
    found = []
    for part in run.parts:
        shape = shape_of(part, per_node)
        found.append(most(needs(shape, part.edges, "nccl" if gpus else "gloo", not gpus)))
    need = max(found, key=lambda one: one.device.total)
    besides = "the process" if gpus else f"about {PROCESS} of the process"
    text = f"at most {_size(need.device.total)} of tensors on rank {need.rank}, besides {besides}; there are {_size(room_bytes)} for a rank"
    for place in ("host", "disk"):
        if waiting := most(found, place).of(place):
            text += f"; {_size(waiting)} wait {'in host memory' if place == 'host' else 'on disk'}"
    return text


def _count(number: int) -> str:
    for unit in ("", "K", "M", "B"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000  # pyright: ignore[reportAssignmentType]
    return f"{number:.3g}T"


def _size(size: float) -> str:
    return f"{size / 2**20:.0f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB"
