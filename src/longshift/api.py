"""The Python front door: what the commands do, as functions that return what `--json` prints, as
frozen values.

    import longshift as ls
    for step in ls.train("run.yaml", "train.lr=2e-5"):
        print(step.loss, step.tokens_per_s)
    ls.check("run.yaml", against="dp2.tp2").passed

A config is a file with overrides such as "train.lr=2e-5", or a Config. What a command tells on
standard error, a function tells there too. Everything that goes wrong because of what was given is
a LongshiftError.

[Note: imports inside functions] `import longshift` and the command line's help and config errors
must not wait for torch. So the functions of this file, of `cli.py` and of `train_command.py`, and
only they, import what needs torch when they are called.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from rich.console import Console
from rich.progress import Progress

from longshift import errors
from longshift.cluster.cluster import Cluster
from longshift.cluster.files import cluster as cluster_named
from longshift.cluster.files import profile_of_host
from longshift.cluster.files import save as save_cluster
from longshift.cluster.host import core_count, has_gpu
from longshift.command_results import (
    CalibrationResult,
    CorpusFacts,
    ExportedFolder,
    LayoutCheck,
    MemoryCheck,
)
from longshift.config import Config
from longshift.config_file import load_config, parse_config
from longshift.dist.launcher import launched, own_rank
from longshift.errors import LongshiftError, UsageError, shown
from longshift.files import temporary_folder, written
from longshift.layout import legal
from longshift.layout.auto_layout import AutoLayout
from longshift.layout.layout import Layout
from longshift.layout_plan import LayoutPlan
from longshift.spec.formats import WeightFormat
from longshift.terminal import NotebookBar, Say, say, silent
from longshift.trainer.metrics import MetricsLog, StepMetrics
from longshift.trainer.python_loop import Steps, close_older, loop_over
from longshift.trainer.resume_config import name_changes, resume_config
from longshift.trainer.run_folder import RunFolder, prepare, read_config
from longshift.trainer.trackers import Trackers, open_trackers
from longshift.workload.length_file import Lengths, read_lengths

if TYPE_CHECKING:
    from longshift.documents.tokens import TokenCache
    from longshift.reports.read import RunReport
    from longshift.step_report import Explanation
    from longshift.trainer.planned_task import PlannedTask
    from longshift.trainer.step_callback import OnStep


def train(
    config: Config | str | Path,
    *overrides: str,
    resume: bool = False,
    crowded: bool = False,
    on: str | None = None,
    on_step: "OnStep | str | None" = None,
) -> Steps:
    """Run a config, or a config file with `overrides` such as "train.lr=2e-5", and yield each
    step's metrics; checkpoints and the run folder are looked after.

    In a process that torchrun started, this is one rank of the run. Elsewhere a layout of several
    ranks runs in local worker processes; leaving the loop early, or Ctrl-C, finishes the step and
    saves. A loop that is still open in the run folder is closed first.

    `resume`: go on from the newest checkpoint. Of a config file, the run's settings stay but for
    the overrides, and what the file has otherwise is told on standard error; a Config is meant as
    it is, and what it changes is told. `crowded`: start more ranks than this machine's cores and
    memory are made for. `on`: "ray", or "ray:4" for 4 devices: ranks start on a Ray cluster, and
    again on the devices that are left after a loss; then steps since the newest checkpoint come
    again. `on_step`: what `train.on_step` is in a config, or, where this process trains alone, the
    function itself (docs/extending.md). Raises LongshiftError."""
    if isinstance(on_step, str):
        config, overrides = _with_callback(config, overrides, on_step)
        on_step = None
    elif on_step is not None and not callable(on_step):
        raise UsageError(f"on_step={shown(on_step)}: a function of (metrics, control) is needed")

    tell = say if own_rank() == 0 else silent
    run = _read(config, overrides)
    close_older(run, tell)
    if resume and isinstance(config, Config):
        name_changes(run, tell)
    elif resume:
        run = resume_config(run, Path(str(config)), overrides, tell)
    if on_step is not None and (on or isinstance(run.layout, AutoLayout) or run.world > 1):
        raise UsageError(
            "on_step is a function of this process, and others train: put it into a module, as in"
            " on_step='my_module:watch'"
        )
    if not on and not isinstance(run.layout, AutoLayout):
        run = with_choices(run, tell)
        # Alone or under a launcher, this process is a rank; else it starts those of the layout.
        if run.world == 1 or launched():
            folder = prepare(run, resume, own_rank(), alone=not launched())
            steps = run_rank(run, folder, resume, on_step=on_step)
            yield from loop_over(run, steps, tell, alone=run.world == 1)
            return
    yield from loop_over(run, _run_workers(run, resume, crowded, on), tell, alone=False)


def data(config: Config | str | Path, *overrides: str) -> CorpusFacts:
    """The documents of a config: how many, how long, what caps would lose. Their tokens are made
    where they are not there. Raises LongshiftError."""
    run = _read(config, overrides)
    from longshift.trainer.corpus import survey

    return survey(run, open_tokens(run))


def check(config: Config | str | Path, *overrides: str, against: Layout | str) -> LayoutCheck:
    """The same batch under the config's layout, or its groups of lengths, and under another layout,
    beside one process in float64: losses, gradients, weights, moments, and documents that leak; of
    each stage of the run. In processes on this machine, on its GPUs where there are, a rank each.
    Raises LongshiftError."""
    run = _read(config, overrides)
    if isinstance(against, str):
        against = Layout.parse(against)
    # Torch takes seconds to load, and the batch longer to train.
    say(f"a batch is trained under the config's layout, under {against}, and by one process")
    stages = []
    for part in run.parts:
        reasons = legal.faults(part.spec, against, None, part.data.max_len, float8=part.float8)
        legal.refuse(against, reasons)
        # Its own choices of chunks and recomputation, as a run with that layout would make them.
        (against_edge,) = with_choices(part.model_copy(update={"layout": against}), say).edges
        part = with_choices(part, say)
        stages.append((part, [[edge.use for edge in part.edges], [against_edge.use]]))
    from longshift.dist.world import own_device
    from longshift.trainer.check_run import check as compare

    return compare(stages, own_device().type)


def check_memory(config: Config | str | Path, *overrides: str) -> MemoryCheck:
    """The first step of a run, recorded on this machine beside what was predicted of its memory:
    peaks by rank, and the operations after which bytes differ most. Raises LongshiftError."""
    run = _read(config, overrides)
    if run.train.compile:
        say("recorded with train.compile=false: torch does not tell what compiled kernels hold")
        run = run.model_copy(update={"train": run.train.model_copy(update={"compile": False})})
    run = with_choices(run, say)
    run.check_layouts()
    # Made here, where a progress bar can be shown, before ranks read them.
    open_tokens(run, verify=False)
    from longshift.dist.world import own_device
    from longshift.trainer.step_trace import timeline

    return timeline(run, own_device().type)


def explain(
    config: Config | str | Path, *overrides: str, per_node: int | None = None
) -> "tuple[Explanation, ...]":
    """What a step inserts, prunes, moves and needs, for each stage of the run, one where it has no
    stages. `per_node`: ranks on each machine, all where not given. Raises LongshiftError."""
    run = with_choices(_read(config, overrides), say)
    from longshift.step_report import explain as explain_part

    ranks = per_node or run.world
    # Seconds of a switch are said only where the links of these machines were measured.
    links = profile_of_host(ranks, -(-run.world // ranks))
    return tuple(explain_part(part, ranks, links, has_gpu()) for part in run.parts)


def plan(
    config: Config | str | Path,
    *overrides: str,
    on: str | None = None,
    fabric: str | None = None,
    lengths: Sequence[int] | str | Path | None = None,
) -> LayoutPlan:
    """The best layouts for the documents on a cluster, what a step takes, what else was compared.
    `on`: as in "64xH100", or a file of `longshift profile -o`, of which all devices are used; this
    machine where not given.
    `fabric`: what a node's network cards carry together, as in "400G". `lengths`: of
    documents in tokens, or a file of them; those of the config's corpus where not given.
    Raises LongshiftError."""
    return make_plan(_read(config, overrides), on, fabric, lengths, silent).result()


def make_plan(
    run: Config,
    on: str | None,
    fabric: str | None,
    lengths: Sequence[int] | str | Path | None,
    progress: Say,
) -> "PlannedTask":
    """What `plan` returns the result of. `progress`: is told what is being done."""
    from longshift.trainer.auto_plan import other_ranks, task_of, unplanned_stages
    from longshift.trainer.auto_plan import plan as search

    cluster = cluster_named(on, fabric) if on else this_machine(core_count())
    if isinstance(lengths, str | Path):
        corpus = read_lengths(Path(lengths))
    else:
        corpus = (
            Lengths.from_array(open_tokens(run, verify=False).lengths)
            if lengths is None
            else Lengths.from_list(lengths)
        )
    if on and (note := other_ranks(run, cluster)):
        say(note)
    if note := unplanned_stages(run):
        say(note)
    return search(task_of(run, cluster, corpus, all_devices=on is not None), progress)


def calibrate(
    run: str | Path, *, on: str | None = None, to: str | Path | None = None
) -> CalibrationResult:
    """Fit what is known of a cluster to the steps of a run folder, finished or not, and write it
    into a file, `cluster.json` of the folder where `to` is not given. `on`: what it trained on, as
    in "8xH100", or a file of `longshift profile -o`; this machine where not given.
    Raises LongshiftError."""
    folder = Path(run)
    config = read_config(folder)
    file = Path(to) if to else folder / "cluster.json"
    from longshift.trainer.step_measurements import fit_measurements

    calibration = fit_measurements(
        folder, config, cluster_named(on) if on else this_machine(config.world), say
    )
    save_cluster(calibration.cluster, file)
    return calibration.result(file)


def export(
    run: str | Path,
    to: str | Path,
    *,
    best: bool = False,
    precision: WeightFormat | None = None,
    merge: bool = False,
) -> ExportedFolder:
    """Write the newest checkpoint of a run folder as the new Hugging Face folder `to`: safetensors,
    config.json, tokenizer; of a run with adapters, the adapters alone as a folder of PEFT. `best`:
    the checkpoint with the lowest validation loss. `precision`: of the weights; that of the model
    folder that the run began with where not given, else float32. `merge`: adapters are added to the
    weights that they are beside. Raises LongshiftError."""
    if precision is not None and precision not in get_args(WeightFormat):
        formats = ", ".join(get_args(WeightFormat))
        raise UsageError(f"precision={shown(precision)}: weights are written as one of {formats}")
    run = Path(run)
    to = Path(to)
    config = read_config(run)
    from longshift.trainer.export import export as write

    write(config, run, to, precision, best, merge)
    return ExportedFolder(
        run=run, folder=to, files=tuple(sorted(file.name for file in to.iterdir()))
    )


def report(*runs: str | Path, to: str | Path | None = None) -> "tuple[RunReport, ...]":
    """What runs have done, in numbers; with `to`, also as an HTML file. Raises LongshiftError."""
    if not runs:
        raise UsageError("report needs a run folder, as in ls.report('run')")
    from longshift.reports.read import read_run

    reports = tuple(read_run(Path(run)) for run in runs)
    if to is not None:
        from longshift.reports.run_page import write

        write(reports, Path(to))
    return reports


def _read(config: Config | str | Path, overrides: Sequence[str]) -> Config:
    """The config. Raises UsageError where it cannot be read or a layout of it cannot be."""
    if not isinstance(config, Config):
        return load_config(config, overrides)
    if overrides:
        raise UsageError(
            "overrides are of a config file, as in ls.train('run.yaml', 'train.lr=2e-5')"
        )
    for part in () if isinstance(config.layout, AutoLayout) else config.parts:
        part.check_layouts()
    return config


def _with_callback(
    config: Config | str | Path, overrides: Sequence[str], on_step: str
) -> "tuple[Config | str | Path, tuple[str, ...]]":
    """The arguments of `train` with `train.on_step`."""
    # JSON is YAML, in which a name with any letters stays as it is.
    override = f"train.on_step={json.dumps(on_step)}"
    if isinstance(config, Config):
        return parse_config(config.to_yaml(), [override]), tuple(overrides)
    return config, (*overrides, override)


def open_tokens(config: Config, verify: bool = True) -> "TokenCache":
    """The tokens of a config, with a progress bar on a terminal or in a notebook while they are
    made; `verify` as in `TokenCache.open`."""
    from longshift.trainer.corpus import open_corpus

    bar = NotebookBar()
    # A notebook tells its processes that there are colours where there is no terminal.
    with Progress(
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task("tokens", total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)
            bar.show("tokens", done, total)

        return open_corpus(config, show, verify)[1]


def with_choices(config: Config, tell: Say) -> Config:
    """With every `chunk-auto` and `recompute-auto` chosen."""
    if isinstance(config.layout, AutoLayout) or not any(edge.use.open for edge in config.edges):
        return config
    from longshift.profile.choose import make_choices

    return make_choices(config, tell)


def this_machine(ranks: int) -> Cluster:
    """What is known of this machine: its profile; else it is measured now, quickly."""
    if profile := profile_of_host(ranks) or profile_of_host(1):
        return profile
    say("this machine was not measured; longshift profile --quick does now")
    from longshift.profile.run import measure_here

    return measure_here(1, True, False, say)


def run_rank(
    config: Config,
    folder: RunFolder,
    resume: bool,
    stop: Callable[[], bool] = lambda: False,
    trace: Path | None = None,
    tell: Say = silent,
    on_step: "OnStep | None" = None,
) -> Steps:
    """The part of a run that this process does, as the rank that the environment says it is. Rank 0
    keeps the metrics.
    `stop`: asked after each step whether to save and end early; a yes on any rank counts for all.
    `trace`, `tell`, `on_step`: see `loop.train`."""
    from longshift.trainer import loop

    log = MetricsLog(folder.metrics)
    names = config.save.trackers if own_rank() == 0 else ()
    trackers = Trackers(
        open_trackers(names, folder.path, config.save.project), config.model_dump(mode="json")
    )
    ok = False

    def record(step: StepMetrics) -> None:
        log.write(step)
        trackers.write(step)

    try:
        yield from loop.train(config, folder.path, resume, stop, trace, record, tell, on_step)
        ok = True
    except GeneratorExit:  # the caller leaves
        ok = True
        raise
    finally:
        trackers.finish(ok)


def _run_workers(config: Config, resume: bool, crowded: bool, on: str | None) -> Steps:
    """The steps of `longshift train` in a process of its own, whose JSON lines are read back."""
    with temporary_folder() as folder:
        file = folder / "config.yaml"
        with written(str(file)):
            file.write_text(config.to_yaml(), encoding="utf-8")
        command = [sys.executable, "-m", "longshift.cli", "train", str(file), "--json"]
        if crowded:
            command.append("--crowded")
        if on:
            command += ["--on", on]
        if resume:
            # Where the folder is named, the command does not say again that it was moved.
            folder_override = f"save.dir={json.dumps(config.save.dir)}"
            command += [*name_changes(config, silent), folder_override, "--resume"]
        # In a group of its own, Ctrl-C does not reach it beside the signal that is sent below: a
        # second one would end it before it has saved.
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, encoding="utf-8", process_group=0
        )
        assert child.stdout is not None
        row = {}
        try:
            for line in child.stdout:
                row = json.loads(line)
                if "step" in row:
                    yield StepMetrics.from_json(row)
        finally:  # a caller that leaves the loop stops the run, which saves
            if child.poll() is None:
                child.send_signal(signal.SIGINT)
            try:
                child.communicate()
            except KeyboardInterrupt:
                child.send_signal(signal.SIGINT)  # the second, which ends it at once
                raise
            code = child.returncode
    if code:  # the last row is the error
        kind = getattr(errors, row.get("kind", ""), LongshiftError)
        raise kind(row.get("error", f"longshift train ended with exit code {code}"))
