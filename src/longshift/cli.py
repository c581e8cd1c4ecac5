"""The command line. Exit codes are those of `errors.py`, and 130 for a run that was stopped; an
error is printed once, last.

What commands need is imported inside them, so that help and config errors come at once: see [Note:
imports inside functions] in `api.py`."""

import signal
from contextlib import suppress

FIRST_HANDLER = signal.getsignal(signal.SIGINT)
# Ctrl-C while the rest is imported ends the command without a traceback.
if FIRST_HANDLER is signal.default_int_handler:
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.SIG_DFL)

import json as jsonlib
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Annotated, NoReturn

from cyclopts import App, CycloptsError, Parameter

from longshift.command_help import EXAMPLES, EXIT_CODES, epilogue
from longshift.dist.memory import address_space, lacks_memory
from longshift.errors import LongshiftError, OutOfMemoryError, UsageError
from longshift.files import NO_ROOM, OF_DISKS, refused
from longshift.spec.formats import WeightFormat
from longshift.terminal import open_streams, read_or_not, say, silent

if FIRST_HANDLER is signal.default_int_handler:
    with suppress(ValueError):
        signal.signal(signal.SIGINT, FIRST_HANDLER)

INTERRUPTED = 130
app = App(
    name="longshift",
    help="Train transformer language models on sequences of any length.",
    version=lambda: import_module("importlib.metadata").version("longshift"),
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(
        negative="", show_default=lambda value: str(value) if value else None
    ),
    help_format="plaintext",
)

Json = Annotated[bool, Parameter(name="--json", help="print JSON")]
File = Annotated[Path, Parameter(help="the run's config file")]
Overrides = Annotated[str, Parameter(help="changes to the config, as in train.lr=2e-5")]


@app.command
def init(
    model: str = "tiny-llama",
    /,
    *,
    data: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")] = (),
    to: Path | None = None,
    json: Json = False,
) -> None:
    """Write a commented starter config.

    Args:
        model: a preset, or a Hugging Face folder on this machine
        data: files, folders or patterns of text; the standard library's sources if none
        to: the file to write; standard output if not given
    """
    from longshift.starter import notes, starter, write_new

    text = starter(model, data)
    if to is not None:
        write_new(text, to)
    if json:
        print(
            jsonlib.dumps({"config": text, "file": str(to) if to else None, "notes": notes(model)})
        )
        return
    for note in notes(model):
        say(note)
    if to is None:
        print(text, end="")
    else:
        print(f"wrote {to}; start it with: longshift train {to}")


@app.command
def train(
    config: File,
    /,
    *overrides: Overrides,
    resume: bool = False,
    resume_auto: Annotated[bool, Parameter(show=False)] = False,
    explain: bool = False,
    trace: Path | None = None,
    crowded: bool = False,
    on: str | None = None,
    restarts: int = 3,
    json: Json = False,
) -> None:
    """Train. Starts the layout's workers on this machine, or on a Ray cluster; under torchrun,
    takes its place from the environment.

    Args:
        resume: continue from the newest checkpoint in save.dir; --resume=auto: if there is one
        explain: say what a step will insert, prune, move and need, and stop
        trace: a file for what rank 0 plays in its first step, to open in ui.perfetto.dev
        crowded: start more ranks than this machine's cores and memory are made for
        on: ray, or ray:4 for 4 devices: ranks on a Ray cluster, again on those left after a loss
        restarts: with --on, how many times in a row to start again without a new checkpoint
    """
    from longshift.config_file import load_config

    run = load_config(config, overrides)

    from longshift.dist.launcher import place
    from longshift.train_command import TrainCommand, leave

    rank, world = place()
    command = TrainCommand(
        config=config,
        overrides=overrides,
        resume=resume,
        resume_auto=resume_auto,
        trace=trace,
        crowded=crowded,
        on=on,
        restarts=restarts,
        json=json,
        rank=rank,
        world=world,
    )
    if explain:
        command.explain(run)
        return
    is_finished = command.train(run, main)
    if world is not None:
        leave(0)
    if not is_finished:
        sys.exit(INTERRUPTED)


@app.command(show=False)
def worker(
    run: Path, /, *, resume: bool = False, trace: Path | None = None, json: Json = False
) -> None:
    """One rank that `train` started. It ends with the process that started it."""
    from longshift.dist.launcher import end_with_parent, launcher_pid
    from longshift.trainer.interrupt import Interrupt

    # Before the imports below, which take a second.
    end_with_parent(signal.SIGKILL, launcher_pid())
    stop = Interrupt()
    from longshift.train_command import work
    from longshift.trainer.run_folder import RunFolder

    work(RunFolder(run), resume, trace, json, stop)


@app.command
def data(config: File, /, *overrides: Overrides, json: Json = False) -> None:
    """Show documents, tokens, a length histogram and what each cap would lose."""
    from longshift import api
    from longshift.print_result import print_result

    print_result(api.data(config, *overrides), json)


@app.command
def check(
    config: File,
    /,
    *overrides: Overrides,
    against: str | None = None,
    timeline: bool = False,
    json: Json = False,
) -> None:
    """Compute the same batch under the config's layout, or its groups of lengths, and another
    layout: loss, gradients, documents that leak.

    In float64, on the GPUs that are visible, a rank each, else on the CPU. With --timeline, play
    the run's first step and compare its memory with what was predicted. The exit code is 1 where a
    layout differs from one process, or a recorded peak from the predicted one.

    Args:
        against: the other layout, such as dp2.tp2
        timeline: compare memory, by rank, and the operations after which it differs most
    """
    from longshift import api
    from longshift.print_result import print_result

    # One report a call: exit codes say whether it is good.
    if timeline == (against is not None):
        raise UsageError("check needs --against LAYOUT or --timeline, one of them")
    if against is None:
        memory = api.check_memory(config, *overrides)
        print_result(memory, json)
        sys.exit(0 if memory.within else 1)
    parity = api.check(config, *overrides, against=against)
    print_result(parity, json)
    sys.exit(0 if parity.passed else 1)


@app.command
def plan(
    config: File,
    /,
    *overrides: Overrides,
    on: str | None = None,
    fabric: str | None = None,
    lengths: Path | None = None,
    emit: Path | None = None,
    trace: Path | None = None,
    html: Path | None = None,
    json: Json = False,
) -> None:
    """Say which layouts are best for the documents on a cluster, what a step takes, and why not
    another. Needs no GPU.

    Exit code 2 where nothing fits, with the smallest change after which something would.

    Args:
        on: 64xH100, 2x8xh100, or a file of longshift profile -o; this machine if none
        fabric: what a node's network cards carry together, as in 400G
        lengths: lengths, one a line, or a histogram .csv; the config's corpus if none
        emit: a file for the config with the best layouts
        trace: a file for a step as it is predicted, to open in ui.perfetto.dev
        html: a file for plots of time, memory and the ways that were compared
    """
    from longshift.config_file import load_config

    run = load_config(config, overrides)

    from longshift import api
    from longshift.print_result import print_result
    from longshift.stream.trace import writable
    from longshift.trainer.auto_plan import write_config
    from longshift.trainer.planned_task import write_trace

    trace = None if trace is None else writable(trace)
    plan = api.make_plan(run, on, fabric, lengths, silent if json else say)
    best = plan.choice.best
    if trace is not None and best is not None:
        write_trace(best, trace)
    if html is not None:
        from longshift.reports.plan_page import write_plan

        write_plan(plan, html)
    if emit is not None:
        write_config(run, plan, emit)
    print_result(plan.result(), json)
    if best is None:
        sys.exit(UsageError.exit_code)


@app.command
def calibrate(
    run: Path,
    /,
    *,
    on: str | None = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    json: Json = False,
) -> None:
    """Fit what is known of a cluster to the steps of a run, finished or not, and write it for
    longshift plan --on.

    Args:
        run: the run folder
        on: what it trained on: 8xH100, or a file of longshift profile -o; this machine if none
        output: the file to write; RUN/cluster.json if none
    """
    from longshift import api
    from longshift.print_result import print_result

    print_result(api.calibrate(run, on=on, to=output), json)


@app.command
def export(
    run: Path,
    /,
    *,
    to: Path,
    best: bool = False,
    precision: WeightFormat | None = None,
    merge: bool = False,
    json: Json = False,
) -> None:
    """Write a run's checkpoint as a Hugging Face folder: safetensors, config.json, tokenizer;
    adapters alone as a folder of PEFT.

    Args:
        run: the run folder
        to: the folder to make
        best: the checkpoint with the lowest validation loss, not the newest
        precision: of the weights; that of the folder it began with if not given
        merge: add adapters to the weights they are beside
    """
    from longshift import api
    from longshift.print_result import print_result

    print_result(api.export(run, to, best=best, precision=precision, merge=merge), json)


@app.command
def report(
    run: Path,
    /,
    *more: Path,
    to: Path | None = None,
    json: Json = False,
) -> None:
    """Write what runs have done as one HTML file: losses, rates, memory, time and tokens by length,
    predicted beside measured.

    Args:
        run: a run folder
        more: run folders to compare it with
        to: the file; report.html in the run folder, longshift-report.html here for several
    """
    from longshift import api

    # A report of one run belongs to it; one of several belongs to none of them.
    file = to or (None if json else Path("longshift-report.html") if more else run / "report.html")
    reports = api.report(run, *more, to=file)
    if json:
        print(jsonlib.dumps({"runs": [run_report.to_json() for run_report in reports]}))
    else:
        print(f"wrote {file}")


@app.command
def profile(
    *,
    quick: bool = False,
    fresh: bool = False,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    html: Path | None = None,
    json: Json = False,
) -> None:
    """Measure this machine: matmul, attention, links, copies, disk. What was measured before is
    shown again.

    On several GPUs, or under torchrun, all ranks measure together.

    Args:
        quick: fewer sizes, in less than half the time
        fresh: measure again what an earlier profile of the same hardware and software has
        output: a file for the profile, which commands that plan take as a machine
        html: a file for plots of matmul, attention, copies, links and disk
    """
    from longshift.cluster import files
    from longshift.dist.launcher import place, ranks_per_node
    from longshift.print_result import plain_console
    from longshift.profile.report import show as show_profile
    from longshift.profile.run import measure_here

    rank, world = place()
    cluster = measure_here(ranks_per_node(world or 1), quick, fresh, say if rank == 0 else silent)
    if rank != 0:
        return
    if output is not None:
        files.save(cluster, output)
    if html is not None:
        from longshift.reports.plan_page import write_profile

        write_profile(cluster, html)
    if json:
        print(jsonlib.dumps(files.encode(cluster)))
    else:
        show_profile(cluster, plain_console())


app.help_epilogue = epilogue((lines[0] for lines in EXAMPLES.values()), EXIT_CODES)
for order, (name, lines) in enumerate(EXAMPLES.items()):
    app[name].sort_key = order
    app[name].help_epilogue = epilogue(lines, "longshift --help lists exit codes.")


def words(line: list[str]) -> list[str]:
    """A command line as the parser takes it: a flag has no value."""
    return ["--resume-auto" if word == "--resume=auto" else word for word in line]


def main() -> None:
    """Entry point: run the command, turn its failure into one message and an exit code."""
    open_streams()
    try:
        with read_or_not(files=True):
            app(words(sys.argv[1:]), exit_on_error=False, print_error=False)
            sys.stdout.flush()  # a full device is told while there is somebody to tell
    except (LongshiftError, CycloptsError) as fault:
        _print_fault(fault)
    except KeyboardInterrupt:
        say("stopped")
        _end(INTERRUPTED)
    except Warning as fault:
        _print_fault(
            UsageError(f"{fault} (a warning that PYTHONWARNINGS, or python -W, makes an error)")
        )
    except Exception as fault:
        if lacks_memory(fault):
            _print_fault(
                OutOfMemoryError(
                    "this process gets no more memory"
                    f" ({str(fault) or 'MemoryError'}){address_space()}"
                )
            )
        if not (isinstance(fault, OSError) and fault.errno in OF_DISKS):
            traceback.print_exc()
            _end(1)
        if fault.errno in NO_ROOM:  # it may be standard output that has none
            say(str(refused(fault)))
            _end(OutOfMemoryError.exit_code)
        _print_fault(refused(fault))


def _print_fault(fault: LongshiftError | CycloptsError) -> NoReturn:
    """Print a person's error and end with its code."""
    code = fault.exit_code if isinstance(fault, LongshiftError) else UsageError.exit_code
    # The parser may have failed, so its answer is not known.
    if "--json" in sys.argv:
        with read_or_not():
            print(
                jsonlib.dumps(
                    {"error": str(fault), "kind": type(fault).__name__, "exit_code": code}
                ),
                flush=True,
            )
    else:
        say(str(fault))
    _end(code)


def _end(code: int) -> NoReturn:
    """A rank that has joined others leaves at once: its peers wait, and an orderly end would wait
    for them."""
    joined = sys.modules.get("torch.distributed")
    if joined is not None and joined.is_initialized():
        from longshift.train_command import leave

        leave(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
