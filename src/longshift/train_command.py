"""`longshift train`: from a config to ranks that train in a run folder.

    config -> layouts and chunks are chosen -> run folder -> ranks: forks of this process's seed
                                                             ranks: actors of a Ray cluster
                                                             this process, as one of a launcher's or
                                                             alone

What needs torch is imported inside functions: see [Note: imports inside functions] in `api.py`.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from longshift import api
from longshift.cluster.host import core_count, forks_ranks
from longshift.config import Config
from longshift.config_file import load_config
from longshift.dist.launcher import call_this_process, describe_place, place, ranks_per_node
from longshift.dist.ranks import Seed
from longshift.errors import UsageError
from longshift.layout.auto_layout import AutoLayout
from longshift.print_result import OutputConsole, print_result
from longshift.stream.trace import writable
from longshift.terminal import read_or_not, say, silent
from longshift.trainer.display import Display
from longshift.trainer.header import Header
from longshift.trainer.interrupt import ENDING, Interrupt
from longshift.trainer.plan_file import PlanFile, keep
from longshift.trainer.resume_config import fit_ranks, resume_config
from longshift.trainer.run_folder import RunFolder, prepare, read_asked, summarize_run, write_cause
from longshift.user_code import printing_aside
from longshift.workload.length_file import Lengths

if TYPE_CHECKING:
    from longshift.trainer.ray_launch import RayDevices


class ChosenConfig(NamedTuple):
    """`requested`: the config, whose layout may be `auto`; `run`: with every choice made; `plan`:
    that of `layout: auto`."""

    requested: Config
    run: Config
    plan: PlanFile | None


@dataclass(frozen=True)
class TrainCommand:
    """The command and its options, as `longshift train --help` has them. `rank`, `world`: this
    process's place, from a launcher."""

    config: Path
    overrides: tuple[str, ...]
    resume: bool
    resume_auto: bool
    trace: Path | None
    crowded: bool
    on: str | None
    restarts: int
    json: bool
    rank: int
    world: int | None

    def explain(self, run: Config) -> None:
        """Say what a step will do. Raises UsageError."""
        resume = self.resume or (self.resume_auto and RunFolder(Path(run.save.dir)).latest.exists())
        run = self._choose(run, resume, None).run
        for explanation in api.explain(run, per_node=ranks_per_node(run.world)):
            print_result(explanation, self.json)

    def train(self, run: Config, main: Callable[[], None]) -> bool:
        """Train. Whether the run is finished: not where it was stopped. `main`: the command line of
        forked ranks. Raises LongshiftError."""
        # 1. A process that ranks are forked from imports what they need, while this one finds out
        # what runs.
        may_have_ranks = isinstance(run.layout, AutoLayout) or run.world > 1
        may_fork = self.world is None and not self.on and may_have_ranks and forks_ranks()
        with (
            Seed(_load, partial(_work, main=main)) if may_fork else nullcontext() as seed,
            self._ray_devices(run) if self.on else nullcontext() as devices,
        ):
            console = OutputConsole(highlight=False)
            header = Header(console, console.is_terminal and self.rank == 0 and not self.json)
            header.begin(run, self.config)
            resume = self.resume or (self.resume_auto and RunFolder(Path(run.save.dir)).begun())
            chosen = self._choose(run, resume, devices)
            run = chosen.run

            # 2. The run folder, and what a person is shown of the run.
            trace = None if self.trace is None else writable(self.trace)
            folder = self._open_folder(run, chosen.plan, resume)
            if self.world is None and (header.shown or run.world > 1):
                header.data(run, api.open_tokens(run, verify=False).lengths)  # the ranks verify
            header.run(run, chosen.plan, folder, resume)

            # 3. Train.
            words = ["worker", str(folder.path), *["--json"] * self.json]
            words += ["--trace", str(trace)] if trace else []
            if devices is not None:
                self._train_on_ray(chosen, folder, resume, words, devices)
            elif self.world is None and run.world > 1:
                self._train_in_forks(run, folder, [*words, *["--resume"] * resume], seed)
            else:
                if seed:
                    seed.close()
                self._train_here(run, folder, resume, trace)

        # 4. Where the run is.
        return self.rank != 0 or _print_summary(run, folder, self.json)

    def _choose(self, run: Config, resume: bool, devices: "RayDevices | None") -> ChosenConfig:
        """The config of a run that begins or is resumed, on the devices of a Ray cluster or here,
        with its layouts and chunks."""
        overrides = self.overrides
        if devices is not None and isinstance(run.layout, AutoLayout):
            overrides = (*overrides, devices.auto_override(run.layout))
            run = load_config(self.config, overrides)
        if resume:
            run = resume_config(run, self.config, overrides, say if self.rank == 0 else silent)
        if devices is not None:
            run = devices.fit(run, resume, say)
        resolved, plan = self._resolve(run)
        return ChosenConfig(requested=run, run=resolved, plan=plan)

    def _resolve(self, run: Config) -> tuple[Config, PlanFile | None]:
        """The run with its layouts and chunks chosen for this machine and the run's corpus, and the
        plan of `layout: auto`. Raises UsageError where that is chosen under a launcher."""
        if not isinstance(run.layout, AutoLayout):
            return api.with_choices(run, say), None
        if self.world is not None:
            raise UsageError(
                "layout: auto is chosen before ranks start: write it down with longshift plan"
                f" CONFIG --emit FILE\n{describe_place()}"
            )
        from longshift.trainer.auto_plan import resolve_layout

        planned, plan = resolve_layout(
            run,
            run.layout,
            api.this_machine,
            lambda: Lengths.from_array(api.open_tokens(run).lengths),
            say,
        )
        return api.with_choices(planned, say), plan

    def _open_folder(self, run: Config, plan: PlanFile | None, resume: bool) -> RunFolder:
        """The run folder, made ready for this run. Raises UsageError where layouts need another
        number of ranks than a launcher's."""
        try:
            if self.world is not None:
                run.check_layouts(self.world)
        except UsageError as fault:
            # Then the launcher is not to blame.
            if self.world == run.world:
                raise
            raise UsageError(f"{fault}\n{describe_place()}") from None
        folder = prepare(run, resume, self.rank, alone=self.world is None)
        if self.rank == 0:
            keep(plan, folder.path, resume)
        return folder

    def _train_in_forks(
        self, run: Config, folder: RunFolder, words: list[str], seed: Seed | None
    ) -> None:
        """Train in ranks of this machine, forked from `seed` where there is one."""
        from longshift.trainer.launch import launch

        launch(
            words if seed else [sys.executable, "-m", "longshift.cli", *words],
            run.world,
            folder,
            say=say,
            stall_timeout_s=run.train.stall_timeout,
            crowded=self.crowded,
            held=True,
            seed=seed,
        )

    def _train_on_ray(
        self,
        chosen: ChosenConfig,
        folder: RunFolder,
        resume: bool,
        words: list[str],
        devices: "RayDevices",
    ) -> None:
        """Train in ranks on the devices of a Ray cluster."""
        from longshift.trainer.ray_launch import RayRun

        def refit(ranks: int) -> tuple[Config, PlanFile | None]:
            return self._resolve(fit_ranks(chosen.requested, ranks))

        RayRun(devices, folder, words, refit, self.restarts, say).train(chosen.run, resume)

    def _ray_devices(self, run: Config) -> "AbstractContextManager[RayDevices]":
        """As many devices as `--on` says, of the Ray cluster that the environment names, or of this
        machine. Raises UsageError without Ray, in a process that has a launcher, and where a run
        that begins has another number of ranks."""
        kind, colon, count = (self.on or "").partition(":")
        if kind != "ray" or (colon and not (count.isdecimal() and int(count))):
            raise UsageError(f"--on {self.on}: write --on ray, or --on ray:4 for 4 devices")
        if self.world is not None:
            raise UsageError(
                "--on ray starts all ranks, and this process is one of a launcher's."
                f" {describe_place()}"
            )
        num_devices = int(count) if count else None
        if not (self.resume or self.resume_auto or isinstance(run.layout, AutoLayout)):
            run.check_layouts(num_devices)
        address = os.environ.get("RAY_ADDRESS") or "local"
        if address == "local":
            # Ray reads these when it is imported: nothing listens beyond loopback, nobody else
            # connects, and nothing is reported.
            os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_USAGE_STATS_ENABLED="0")
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token_hex(32))
        try:
            from longshift.trainer.ray_launch import connect
        except ImportError as fault:
            if fault.name != "ray":
                raise
            raise UsageError("--on ray needs a package: pip install 'longshift[ray]'") from None
        ranks = num_devices or (
            (run.layout.ranks or core_count()) if isinstance(run.layout, AutoLayout) else run.world
        )
        return connect(None if address == "local" else address, num_devices, ranks, self.crowded)

    def _train_here(self, run: Config, folder: RunFolder, resume: bool, trace: Path | None) -> None:
        """Train in this process, which none of ours looks after: a failure is raised in the class
        of its cause."""
        stop = Interrupt(*ENDING, say=say if self.rank == 0 else silent)
        # torchrun, which may be killed: its ranks save and end.
        if "TORCHELASTIC_RUN_ID" in os.environ:
            stop.end_with_launcher()
        try:
            _run_rank(run, folder, self.rank, resume, self.json, stop, trace)
        except Exception as fault:
            from longshift.trainer.launch import rank_error

            error = rank_error(fault, self.rank)
            if self.world is not None:
                write_cause(folder, self.rank, error)
            if error is fault:
                raise
            raise error from fault


def work(
    folder: RunFolder, resume: bool, trace: Path | None, json: bool, stop: Callable[[], bool]
) -> NoReturn:
    """Be a rank that `train` started. `stop`: whether to save and end early."""
    rank, _ = place()
    call_this_process(f"longshift-r{rank}")
    from longshift.trainer.launch import rank_error, tell

    try:
        _joined = folder.joined()  # open until this process ends
        _run_rank(read_asked(folder.path), folder, rank, resume, json, stop, trace)
        leave(0)
    except Exception as fault:
        tell(write_cause(folder, rank, rank_error(fault, rank)))
        leave(1)


def leave(code: int) -> NoReturn:
    """End a rank at once: gloo's own orderly shutdown now and then aborts or hangs, and would fail
    a run that has succeeded."""
    with read_or_not():
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _load() -> None:
    """Import what ranks need."""
    import longshift.trainer.launch
    import longshift.trainer.loop  # noqa: F401


def _work(words: Sequence[str], main: Callable[[], None]) -> None:
    """What a rank does in a fork of a process that has done `_load`: the command of these words."""
    import torch

    # The seed imported torch before this variable was set.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.argv[1:] = words
    main()


def _run_rank(
    run: Config,
    folder: RunFolder,
    rank: int,
    resume: bool,
    json: bool,
    stop: Callable[[], bool],
    trace: Path | None,
) -> None:
    """Train as this process's rank; rank 0 shows the steps."""
    display = Display(run.train.steps, json, latest=folder.latest) if rank == 0 else None
    # A loss or a rule may print at any step, also in another thread. The display has kept standard
    # output.
    with display or nullcontext(), printing_aside():
        for step in api.run_rank(
            run, folder, resume, stop, trace, display.memory if display else silent
        ):
            if display:
                display.show(step)


def _print_summary(run: Config, folder: RunFolder, json: bool) -> bool:
    """Print where the run is. Whether it is finished, as far as that could be read and printed."""
    # A summary that cannot be printed does not make a finished run an unfinished one.
    is_finished = True
    with read_or_not():
        summary = summarize_run(run, folder)
        is_finished = summary.finished
        print_result(summary, json)
    return is_finished
