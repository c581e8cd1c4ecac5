"""What a terminal shows of a run before its first step: model, data, layout and why, run folder,
how to go on; memory is told by the rank that shows steps, as soon as it is weighed. Needs no torch.

    longshift 0.1.0
    config  examples/quickstart.yaml
    model   tiny-llama: 1.79M parameters, 4 blocks of width 128, 4,096 tokens;
            random weights, from seed 0; a tokenizer of 4,096 tokens of Python sources
    data    1,758 documents, 9,478,507 tokens; the longest has 197,309,
            and documents of more than 1K are split
            to 1K     36.9%  ██████████████████████████████
    ...
    layout  documents to 512: dp4; documents to 1K: dp2.tp2, 4 ranks
    run     runs/quickstart: 80 steps of 8K tokens
    resume  longshift train runs/quickstart/config.yaml --resume
    memory  at most 0.06 GiB of tensors, on rank 0, and 0.36 GiB of the process;
            a rank may have 5.90 GiB

Everything here is also elsewhere, for programs: `longshift data --json`, `longshift train --explain
--json`, plan.json, config.yaml.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from longshift.config import Config
from longshift.config_parts import PROJECT_VOCAB
from longshift.errors import printable
from longshift.layout.layout import format_size
from longshift.spec.formats import EIGHT_BITS
from longshift.terminal import short_number
from longshift.trainer.display import LABEL, named_lines
from longshift.trainer.plan_file import PlanFile
from longshift.trainer.run_folder import RunFolder, shown_path
from longshift.workload.lengths import Bin, histogram

ROWS = 8  # of lengths
BAR = 30  # columns of the longest bar


class Header:
    """Lines on a terminal, each as soon as it is known. Mutable: the console."""

    def __init__(self, console: Console, shown: bool):
        self._console = console
        self.shown = shown

    def begin(self, run: Config, file: Path) -> None:
        """What the config alone says."""
        with suppress(PackageNotFoundError):  # of a source tree that is not installed
            self._print([f"longshift {version('longshift')}"])
        self._tell(config=str(file), model=model_told(run))

    def data(self, run: Config, lengths: np.ndarray) -> None:
        """What the documents are."""
        if self.shown:
            self._tell(data=data_told(run, lengths))
            self._print(length_rows(lengths))

    def run(self, run: Config, plan: PlanFile | None, folder: RunFolder, resume: bool) -> None:
        """What is known before ranks start."""
        if self.shown:
            steps = f"{run.train.steps:,} steps of {format_size(run.train.tokens_per_step)} tokens"
            steps += f", of which {folder.steps_done():,} are done" if resume else ""
            if run.formats.float8:
                self._tell(float8=EIGHT_BITS)
            self._tell(
                layout=layout_told(run, plan),
                run=f"{folder.shown}: {steps}",
                resume=folder.resume_command,
            )

    def _tell(self, **texts: str) -> None:
        for name, text in texts.items():
            self._print(named_lines(name, text, self._console.width))

    def _print(self, lines: Iterable[str]) -> None:
        if self.shown:
            for line in lines:
                self._console.print(Text(printable(line)), soft_wrap=True)


def model_told(run: Config) -> str:
    """The model, its size, and where its weights and its tokenizer come from."""
    spec = run.spec
    model = run.model
    path = run.data.tokenizer or model.path
    if path:
        tokenizer = f"tokenizer of {shown_path(Path(path))}"
    else:
        tokenizer = f"a tokenizer of {min(PROJECT_VOCAB, spec.vocab):,} tokens of Python sources"
    if model.init == "pretrained":
        origin = f"weights of {shown_path(Path(model.path or ''))}"
    else:
        origin = f"random weights, from seed {run.train.seed}"
    name = model.preset or Path(model.path or "").name
    active = f" ({_count(spec.active)} active)" if spec.experts else ""
    size = (
        f"{_count(spec.parameters)} parameters{active}, {spec.layers} blocks of width {spec.width},"
        f" {spec.vocab:,} tokens"
    )
    return f"{name}: {size}; {origin}; {tokenizer}"


def data_told(run: Config, lengths: np.ndarray) -> str:
    """How many documents and tokens there are, and what becomes of the longest."""
    longest = int(lengths.max()) if len(lengths) else 0
    text = f"{len(lengths):,} documents, {int(lengths.sum()):,} tokens; the longest has {longest:,}"
    limit = run.data.max_len
    return text + (
        f", and documents of more than {format_size(limit)} are {CUT[run.data.overlong]}"
        if longest > limit
        else ""
    )


CUT = {
    "split": "split",
    "truncate": "truncated",
    "drop": "dropped",
    None: "refused: write data.overlong",
}


def length_rows(lengths: np.ndarray) -> Iterator[str]:
    """A small histogram of the documents by length; the outermost share a row
    where there are many."""
    bins = list(histogram(lengths))
    while len(bins) > ROWS:
        # Merge two bins at the end where there are fewer documents.
        begin = 0 if bins[0].documents <= bins[-1].documents else len(bins) - 2
        short, long = bins[begin : begin + 2]
        merged = Bin(
            short.low, long.high, short.documents + long.documents, short.tokens + long.tokens
        )
        bins[begin : begin + 2] = [merged]
    most_documents = max((bin.documents for bin in bins), default=0)
    for number, bin in enumerate(bins):
        bar = "█" * round(BAR * bin.documents / most_documents)
        what = "" if number else " of documents"
        size = f"{'':<{LABEL}}to {format_size(bin.high):<5}"
        yield f"{size} {bin.documents / len(lengths):6.1%}{what:<14}{bar}".rstrip()


def layout_told(run: Config, plan: PlanFile | None) -> str:
    """The layout of every length and, where a plan has chosen it, why."""
    ranks = f"{run.world} rank{'s' * (run.world > 1)}"
    parts = [f"documents to {format_size(edge.upto)}: {edge.use}" for edge in run.edges]
    text = f"{parts[0].rpartition(': ')[2] if len(parts) == 1 else '; '.join(parts)}, {ranks}"
    if len(run.parts) > 1:
        text += f", in the first of {len(run.parts)} stages"
    return text + (f"; {plan_reason(plan)}" if plan else "")


def plan_reason(plan: PlanFile) -> str:
    """Why the planner chose a layout, in a sentence."""
    facts = plan.facts or {}
    ways = facts.get("tried") or []
    candidates = facts.get("candidates")
    if plan.chosen is not None and len(plan.choices) > 1:
        return (
            f"layout: auto trained {len(plan.choices)} choices a few steps each, and goes on with"
            " this one"
        )
    # Choices are tried in order, so this is the one that is trained next.
    number = len(plan.trials)
    if not candidates or number >= len(ways):
        reason = "layout: auto chose it"
    else:
        other_s = [way["seconds"] for way in ways]
        layout_s = other_s.pop(number)
        reason = f"layout: auto compared {candidates:,} and predicts {layout_s:.3g} s a step"
        if other_s:
            reason += (
                f", and {min(other_s):.3g} to {max(other_s):.3g} s with the others that are tried"
            )
    trials = f"{len(plan.choices)} choices are trained a few steps each, and the fastest goes on"
    return reason if plan.chosen is not None else f"{reason}; {trials}"


def _count(number: int) -> str:
    # Parameters are counted in thousands, millions, billions and trillions.
    return short_number(number, prefixes=("", "K", "M", "B", "T")).replace(" ", "")
