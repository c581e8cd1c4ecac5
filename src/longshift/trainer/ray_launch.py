"""Ranks on the devices of a Ray cluster, started again on the devices that are left.

    longshift train --on ray -> RayDevices: a placement group, an actor on each GPU
                                  |         (dist.rank_actor)
                                  |          actor -> longshift worker RUN (rank 0)
                                  |          actor -> longshift worker RUN (rank 1) ...
                                  +-- an actor is lost: the other ranks end, and the run goes on
                                      from its newest checkpoint on the devices whose actors are
                                      there

Where all ranks are on the driver's machine they meet at a store on loopback, as those of
`trainer.launch`. On several machines they meet at MASTER_ADDR, the machine of rank 0,
as under torchrun.
"""

import json
import logging
import signal
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.exceptions import OutOfMemoryError as RayMemoryError
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from longshift.cluster.host import core_count, has_gpu
from longshift.config import Config
from longshift.config_parts import layout_out
from longshift.dist.rank_actor import RankActor, RankOutput
from longshift.dist.ranks import Ranks
from longshift.dist.sealed_store import SealedStore
from longshift.dist.world import allocator
from longshift.errors import LongshiftError, OutOfMemoryError, PeerError, UsageError
from longshift.files import temporary_folder
from longshift.layout.auto_layout import AutoLayout
from longshift.step_report import layout_text
from longshift.terminal import Say, read_or_not
from longshift.trainer.launch import (
    Interrupts,
    StopAtOnce,
    check_room,
    gather_causes,
    local_environment,
    open_store,
    terminated_ranks,
)
from longshift.trainer.plan_file import PlanFile, keep
from longshift.trainer.resume_config import fit_ranks
from longshift.trainer.run_folder import (
    Cause,
    RunFolder,
    as_error,
    clear_causes,
    prepare,
    root_cause,
)

RESERVE_S = 60.0  # to wait for devices that other jobs hold
POLL_S = 0.5
ANSWER_S = 60.0  # after which an actor that does not answer is lost
OBJECT_STORE_BYTES = 80 << 20  # nearly the least that Ray takes: lines of text pass there

Refit = Callable[[int], tuple[Config, PlanFile | None]]


class Place(NamedTuple):
    """An actor and where it is: Ray's name of its machine, and the machine's address."""

    actor: Any
    node: str
    address: str


class RayDevices:
    """The devices of a Ray cluster that a run has. `asked`: how many the command line names;
    `kind`: GPU, or CPU where the cluster has no GPU; `count`: how many the cluster has. Mutable:
    the actors of those that are reserved and not lost."""

    def __init__(self, asked: int | None) -> None:
        self.asked = asked
        self.places: list[Place] = []
        resources = ray.cluster_resources()
        self.kind = "GPU" if resources.get("GPU", 0) >= 1 else "CPU"
        self.count = int(resources.get(self.kind, 0))

    @property
    def is_local(self) -> bool:
        """Whether all actors are on this machine."""
        return {place.node for place in self.places} == {ray.get_runtime_context().get_node_id()}

    def check(self, ranks: int) -> None:
        """Raises UsageError for more ranks than the cluster has devices."""
        if ranks > self.count:
            raise UsageError(
                f"{ranks} ranks need a {self.kind} each, and the Ray cluster has {self.count}: take"
                " a layout of fewer ranks"
            )

    def auto_override(self, request: AutoLayout) -> str:
        """The override by which `layout: auto` is planned for the devices that are asked
        for, or all."""
        devices = self.asked or request.ranks or self.count
        return f"layout={json.dumps(AutoLayout(devices, request.fixed).to_json())}"

    def fit(self, run: Config, resume: bool, say: Say) -> Config:
        """The config of a run on these devices. A run that is resumed gets another layout where it
        must. Raises UsageError."""
        if isinstance(run.layout, AutoLayout):
            self.check(run.layout.ranks or self.count)
            if self.kind == "GPU" and not has_gpu():
                raise UsageError(
                    "layout: auto is planned for the machine of this command, which has no GPU:"
                    " start it on a machine of the cluster, or write the layout down with longshift"
                    " plan CONFIG --on 2x8xH100 --emit FILE"
                )
            return run
        if not resume and self.asked not in (None, run.world):
            raise UsageError(
                f"layout {run.model_dump(mode='json')['layout']} has {run.world} ranks, and --on"
                f" ray:{self.asked} other"
            )
        self.check(self.asked or (1 if resume else run.world))
        fitted = fit_ranks(run, self.asked or min(run.world, self.count)) if resume else run
        tell_change(run, fitted, say)
        return fitted

    def reserve(self, ranks: int) -> None:
        """Start an actor on each of so many devices, those of a machine one after another.
        Raises UsageError."""
        self.check(ranks)
        group = placement_group([{self.kind: 1.0}] * ranks, strategy="PACK")
        if not group.wait(RESERVE_S):
            raise UsageError(
                f"Ray has not given {ranks} {self.kind}s within {RESERVE_S:.0f} s, which other jobs"
                " may hold: ray status shows them"
            )
        share = {"num_gpus": 1, "num_cpus": 0} if self.kind == "GPU" else {"num_cpus": 1}
        actor_class = ray.remote(RankActor)
        actors = []
        for index in range(ranks):
            bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            actors.append(actor_class.options(**share, scheduling_strategy=bundle).remote())
        try:
            ray.get([actor.poll.remote(0.0) for actor in actors], timeout=RESERVE_S)
        except (RayActorError, GetTimeoutError) as fault:
            reason = str(fault).strip().splitlines()[0]
            raise UsageError(
                f"Ray cannot start the ranks' actors: {reason}; all machines of a run need the same"
                " longshift"
            ) from fault

        nodes = [
            node for _, node in sorted(placement_group_table(group)["bundles_to_node_id"].items())
        ]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        places = [Place(actor, node, addresses[node]) for actor, node in zip(actors, nodes)]
        # Ray may give bundles of one machine in any order; ranks of a machine are neighbors.
        self.places = sorted(places, key=lambda place: nodes.index(place.node))

    def drop(self, ranks: Collection[int]) -> None:
        """Give up the devices of these ranks."""
        for rank in ranks:
            ray.kill(self.places[rank].actor)
        self.places = [place for rank, place in enumerate(self.places) if rank not in ranks]


@contextmanager
def connect(
    address: str | None, asked: int | None, ranks: int, crowded: bool
) -> Iterator[RayDevices]:
    """The devices of the Ray cluster at an address, of which `asked` are used, or as many as the
    layout has ranks. Without an address, of a cluster that is started on this machine, with cores
    for so many `ranks`, and ends with the block. Raises UsageError."""
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    with temporary_folder() as folder:
        if address is None:
            check_room(ranks, crowded)
            options |= {
                "num_cpus": max(ranks, core_count()),
                "object_store_memory": OBJECT_STORE_BYTES,
                "include_dashboard": False,
                "_temp_dir": str(folder),
            }
        try:
            ray.init(address or "local", **options)
        except (OSError, ValueError, RuntimeError) as fault:
            reason = f"no Ray cluster answers at RAY_ADDRESS={address}: {fault}"
            if address is None:
                reason = (
                    f"Ray cannot start on this machine: {fault}; its sockets need a short TMPDIR,"
                    " such as /tmp"
                )
            raise UsageError(reason) from fault
        try:
            yield RayDevices(asked)
        finally:
            ray.shutdown()


class RayRanks(Ranks):
    """The ranks of one start, on the actors of `devices`. `out`: for what they print on standard
    output. `lost`: by rank, why an actor no longer answers.

    Mutable: what is known of the ranks, and signals that wait to be sent."""

    def __init__(
        self,
        devices: RayDevices,
        world: int,
        words: Sequence[str],
        store: SealedStore | None,
        out: TextIO,
    ):
        self.lost: dict[int, Cause] = {}
        self._actors = [place.actor for place in devices.places[:world]]
        self._codes: dict[int, int] = {}
        self._signals: list[int] = []
        self._out = out
        folder = str(Path.cwd())
        # Only the machine of rank 0 knows which of its ports is free.
        port = self._ask("free_port", {0: ()}).get(0) if store is None else None
        if store is not None:
            environments = [local_environment(store, rank, world) for rank in range(world)]
        else:
            environments = cluster_environments(devices.places[:world], port or 0)
        orders = {rank: (list(words), environments[rank], folder) for rank in self._running}
        super().__init__(self._ask("start", orders))

    def codes(self) -> dict[int, int]:
        return dict(self._codes)

    def wait(self, within_s: float) -> None:
        while self._signals:
            number = self._signals.pop(0)
            self._ask("send", dict.fromkeys(self._running, (number,)))
        self._take(self._ask("poll", dict.fromkeys(self._running, (within_s,))))

    def send(self, number: signal.Signals, group: bool = False) -> None:
        """Have the next `wait` send a signal: a signal handler calls this, which may have
        interrupted Ray."""
        self._signals.append(number)

    def end(self) -> None:
        reachable = [rank for rank in range(len(self._actors)) if rank not in self.lost]
        self._take(self._ask("end", dict.fromkeys(reachable, ())))

    @property
    def _running(self) -> list[int]:
        return [rank for rank in range(len(self._actors)) if rank not in self._codes]

    def _ask(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """What the actors of ranks answer to a method with these arguments. Actors that do not
        answer are lost."""
        # All are asked before the first answer is waited for, so they work at the same time.
        answers: dict[int, Any] = {}
        references = {
            rank: getattr(self._actors[rank], method).remote(*values)
            for rank, values in arguments.items()
        }
        for rank, reference in references.items():
            try:
                answers[rank] = ray.get(reference, timeout=ANSWER_S)
            except (RayActorError, GetTimeoutError, RayMemoryError) as fault:
                self.lost[rank] = cause_of_loss(rank, fault)
                self._codes[rank] = -signal.SIGKILL
            except RayTaskError as fault:
                raise fault.cause if isinstance(fault.cause, LongshiftError) else fault from None
        return answers

    def _take(self, outputs: Mapping[int, RankOutput]) -> None:
        """Print what ranks have printed, and keep exit codes."""
        for rank, output in outputs.items():
            for line, is_error in output.lines:
                with read_or_not():
                    print(line, end="", file=sys.stderr if is_error else self._out, flush=True)
            if output.code is not None:
                self._codes.setdefault(rank, output.code)


def cluster_environments(places: Sequence[Place], port: int) -> list[dict[str, str]]:
    """What ranks on several machines find in their environments: torchrun's variables, with rank
    0's machine as MASTER_ADDR.

    All ranks need the same LOCAL_WORLD_SIZE, by which they plan switches: the largest, where
    machines differ."""
    counts = Counter(place.node for place in places)
    seen = Counter[str]()
    shared = {
        "WORLD_SIZE": str(len(places)),
        "LOCAL_WORLD_SIZE": str(max(counts.values())),
        "MASTER_ADDR": places[0].address,
        "MASTER_PORT": str(port),
        **allocator(),
    }
    environments = []
    for rank, place in enumerate(places):
        environments.append(shared | {"RANK": str(rank), "LOCAL_RANK": str(seen[place.node])})
        seen[place.node] += 1
    return environments


def cause_of_loss(rank: int, fault: Exception) -> Cause:
    """The cause of a rank whose actor does not answer. Of Ray's many lines the one counts that says
    what has died."""
    if isinstance(fault, RayMemoryError):
        message = f"rank {rank} was ended by Ray, as its machine has no more memory"
        return Cause(rank=rank, kind=OutOfMemoryError.__name__, message=message)
    if isinstance(fault, GetTimeoutError):
        reason = f"its actor has not answered for {ANSWER_S:.0f} s"
    else:
        lines = [line.strip() for line in str(fault).splitlines()]
        deaths = [line for line in lines if line.startswith("The actor is dead because")]
        death = deaths[0] if deaths else "its actor cannot be reached"
        death = death.replace("The actor is dead because its", "its actor's")
        reason = death.partition(". ")[0].rstrip(".")
    return Cause(rank=rank, kind="Signal", message=f"rank {rank} was lost: {reason}")


def tell_change(config: Config, fitted: Config, say: Say) -> None:
    """Say to which layout a run changes, if it does."""
    if fitted.layout != config.layout:
        before, after = (layout_out(each.layout) for each in (config, fitted))
        say(f"layout {layout_text(before)} becomes {layout_text(after)}")


def is_of_device(cause: Cause) -> bool:
    """Whether a rank failed by its GPU, and not by what it computed there."""
    return cause.kind == "AcceleratorError" and "assert" not in cause.message


@dataclass(frozen=True)
class RayRun:
    """A run on Ray. `words`: of the command of its ranks, without --resume; `refit`: the config,
    and its plan, for fewer ranks; `restarts`: how many times it may start again without a new
    checkpoint; `out`: for what rank 0 prints."""

    devices: RayDevices
    folder: RunFolder
    words: Sequence[str]
    refit: Refit
    restarts: int
    say: Say
    out: TextIO = field(default_factory=lambda: sys.stdout)

    def train(self, config: Config, resume: bool) -> None:
        """Train until the run ends, on the devices that are left after a loss. Raises the
        LongshiftError of a failure that is no loss of a rank, PeerError after too many losses, and
        KeyboardInterrupt at a second Ctrl-C."""
        self.devices.reserve(config.world)
        # Ray tells of machines on standard output.
        with redirect_stdout(sys.stderr), Interrupts(self.say) as interrupts:
            try:
                self._train(config, resume, interrupts)
            except StopAtOnce:
                raise KeyboardInterrupt from None

    def _train(self, config: Config, resume: bool, interrupts: Interrupts) -> None:
        restarts = 0
        while True:
            saved = self.folder.steps_saved()
            cause, lost = self._start(config, resume, interrupts)
            if cause is None:
                return

            # 1. Another start would end as this one did, unless a rank was lost.
            error = as_error(cause)
            is_loss = isinstance(error, PeerError) or cause.rank in lost
            if interrupts.received or not is_loss:
                raise error
            restarts = 1 if self.folder.steps_saved() > saved else restarts + 1
            if restarts > self.restarts:
                raise PeerError(
                    f"{error}; started {self.restarts} times again without a new checkpoint, and"
                    f" not once more{self._hint()}"
                )

            # 2. Take the devices that are left, a layout for them, and the newest checkpoint.
            before = len(self.devices.places)
            self.devices.drop(lost)
            if not self.devices.places:
                raise PeerError(f"{error}; no device is left{self._hint()}")
            self.say(f"{error}; {len(self.devices.places)} of {before} devices are left")
            config, resume = self._again(config)

    def _start(
        self, config: Config, resume: bool, interrupts: Interrupts
    ) -> tuple[Cause | None, set[int]]:
        """Train in ranks that are started once: why they have failed, None if they have not, and
        the ranks whose devices are lost."""
        clear_causes(self.folder)
        store = open_store() if self.devices.is_local else None
        ranks = RayRanks(
            self.devices, config.world, [*self.words, *["--resume"] * resume], store, self.out
        )
        try:
            interrupts.reach(ranks)
            while len(codes := ranks.codes()) < config.world and not any(codes.values()):
                ranks.wait(POLL_S)
            terminated = list(terminated_ranks(ranks))
        finally:
            ranks.end()
        failed = {rank: code for rank, code in ranks.codes().items() if code}
        if not failed:
            return None, set()
        observed = [*ranks.lost.values(), *terminated]
        causes = gather_causes(store, config.world, self.folder, observed)
        lost = {*ranks.lost, *(cause.rank for cause in causes if is_of_device(cause))}
        return root_cause(causes, failed), lost

    def _again(self, config: Config) -> tuple[Config, bool]:
        """The config for the devices that are left, in a folder that is ready for it, and whether
        there is a checkpoint to go on from."""
        # Counted first, as `begun` puts metrics without a checkpoint aside.
        rows = self.folder.steps_done()
        resume = self.folder.begun()
        step = self.folder.steps_saved()
        fitted, plan = self.refit(len(self.devices.places))
        prepare(fitted, resume)
        keep(plan, self.folder.path, resume)
        tell_change(config, fitted, self.say)
        if idle := len(self.devices.places) - fitted.world:
            self.say(f"{idle} of the devices that are left {'is' if idle == 1 else 'are'} not used")
        place = "from the start, as there is no checkpoint yet"
        if resume:
            place = f"from {self.folder.path}/checkpoints/step-{step}"
        again = ""
        if rows == step + 1:
            again = f"; step {rows} again"
        elif rows > step:
            again = f"; steps {step + 1} to {rows} again"
        self.say(f"going on {place}{again}")
        return fitted, resume

    def _hint(self) -> str:
        """How the run can be resumed, at the end of a sentence."""
        if not self.folder.latest.exists():
            return ""
        return f": resume with {self.folder.resume_command} --on ray"
