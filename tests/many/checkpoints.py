"""What the tests of checkpoints and faults run in forked worlds. Every function is called as f(world, **JSON) on each rank."""

import errno
import json
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
from safetensors.torch import load_file, save_file
from torch import Tensor
from trial import Trial, build, parse_layouts

from longshift.config_file import parse_config
from longshift.dist.world import World
from longshift.documents import tokens
from longshift.documents.tokenizer import train as train_tokenizer
from longshift.errors import CheckpointError, LongshiftError, NonFiniteError, OutOfMemoryError
from longshift.layout.box import Box
from longshift.layout.layout import Layout
from longshift.model.kernels import FLASH
from longshift.program.operations import Op
from longshift.spec.model import ModelSpec
from longshift.state import checkpoint
from longshift.state import saver as saver_module
from longshift.state.checkpoint import Checkpoint
from longshift.state.home import Home, fill
from longshift.state.optimizer import Optimizer
from longshift.state.precision import LossScale, Precision
from longshift.state.saver import Saver, StateCopy
from longshift.state.transfer import SwitchTransfer
from longshift.step import player as player_module
from longshift.step.update import State, train_step
from longshift.trainer import corpus, loop
from longshift.trainer.build_run import stages_of
from longshift.trainer.facts import Facts
from longshift.trainer.step_trace import StepTrace
from longshift.weigh.state_memory import saved_bytes

SPEC = ModelSpec("llama", vocab=37, width=12, layers=3, heads=4, kv_heads=2, head_width=4, ffn=14, max_positions=64, init_std=0.1)
TRIAL = Trial(SPEC, ((5, 9, 1, 7), (11, 3, 8), (6, 6, 2)), precision="float32", capacity=16)
FIRST_SCALE = 2.0**20
TOUCHES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")  # audit events that touch the file system


def bits(x: Tensor) -> bytes:
    """A tensor's exact content: NaN equals itself, and 0 is not -0."""
    return x.detach().contiguous().view(torch.uint8).numpy().tobytes()


def begin(world: World, run: str, layout: str, steps: int = 2, file_bytes: int = checkpoint.FILE_BYTES, background: bool = False) -> None:
    """Train a little under a layout, write each rank's own view of its state beside the run, and save."""
    state, player = build(TRIAL, [Layout.parse(layout)], world)
    for batch in TRIAL.batches()[:steps]:
        train_step(state, batch, player)
    views = {f"{k}|{name}|{box}": v.clone() for name, box, _, kinds in state.optimizer.state() for k, v in kinds.items() if box}
    save_file(views, f"{run}-live-{world.rank}.safetensors")
    with patch.object(checkpoint, "FILE_BYTES", file_bytes):
        _save(world, Path(run), state, steps, background=background)


def carry(world: World, source: str, target: str, layout: str, truth: str | None = None) -> tuple[int, int, int]:
    """Load a run's newest checkpoint under a layout and save it elsewhere. Returns the step, the values this rank holds, and how many of
    their kinds and boxes differ in any bit from the whole weights in the file `truth`."""
    saved = Checkpoint.latest(Path(source), world)
    saved.expect(SPEC, TRIAL.rule.moments)
    state = _blank(world, Layout.parse(layout))
    for shard in state.home.shards:
        fill(shard, saved.source())
    state.optimizer.restore(saved.read, "float32", saved.facts["updates"])
    whole = load_file(truth) if truth else {}
    held = wrong = 0
    for name, box, _, kinds in state.optimizer.state():
        for kind, view in kinds.items():
            all_of_it = Box.whole(SPEC.by_name[name].shape)
            held += box.elements
            wrong += bool(truth) and bits(view) != bits(whole[f"{kind}|{name}|{all_of_it}"][box.within(all_of_it)])
    _save(world, Path(target), state, saved.step)
    return state.optimizer.steps, held, wrong


def load_counted(world: World, config: str) -> dict[str, Any]:
    """Resume a run and count what this rank does, by what it does it to: files opened, boxes of a weight's kind read, texts of boxes
    parsed, facts parsed."""
    counts: dict[str, Counter[str]] = {what: Counter() for what in ("opened", "read", "parsed", "facts")}

    def counted(what: str, call: Callable, name: Callable[..., str]) -> Callable:
        def counting(*given: Any, **named: Any) -> Any:
            counts[what][name(*given)] += 1
            return call(*given, **named)

        return counting

    opened = counted("opened", checkpoint.safe_open, lambda path: path.name)
    read = counted("read", Checkpoint.read, lambda _, kind, name, box: f"{kind}|{name}|{box}")
    parsed = counted("parsed", Box.parse, lambda text: text)
    facts = counted("facts", Facts.of, lambda saved: str(saved.step))
    patches = (checkpoint, "safe_open", opened), (Checkpoint, "read", read), (checkpoint.Box, "parse", parsed), (Facts, "of", facts)
    with ExitStack() as stack:
        for place, name, call in patches:
            stack.enter_context(patch.object(place, name, call))
        run_loop(world, config, resume=True)
    return {what: dict(count) for what, count in counts.items()}


def _spoil(optimizer: Optimizer) -> None:
    """Have every value of a state be wrong."""
    for _, _, _, kinds in optimizer.state():
        for view in kinds.values():
            view.fill_(-7.0)


def _blank(world: World, layout: Layout) -> State:
    """A state whose every value is wrong."""
    home = Home(SPEC, layout, world, Precision.of("float32"), lambda _, box: torch.full(box.shape, -7.0), rule=TRIAL.rule)
    optimizer = Optimizer(home, TRIAL.rule)
    _spoil(optimizer)
    return State(SPEC, home, optimizer, TRIAL.schedule, TRIAL.clip)


def _save(world: World, run: Path, state: State, step: int, keep: int = 3, background: bool = False) -> None:
    """Save a state. In the background every value becomes wrong before the first is written."""
    saver, go_on, native = Saver(run, world, keep, background), threading.Event(), checkpoint._write_tensors

    def late(*given: Any) -> list[dict]:
        assert go_on.wait(60)
        return native(*given)

    with patch.object(checkpoint, "_write_tensors", late if background else native):
        saver.save(step, state.optimizer, {"updates": state.optimizer.steps}, None, last=False)
        if background:
            assert saver.busy
            _spoil(state.optimizer)
            go_on.set()
        saver.finish()


def save_steps(world: World, run: str, layout: str, steps: list[int], keep: int = 3) -> None:
    """Save the same state as several steps."""
    state = build(TRIAL, [Layout.parse(layout)], world)[0]
    for step in steps:
        _save(world, Path(run), state, step, keep)


def open_latest(world: World, run: str) -> dict[str, Any]:
    """The step, or the error, of a run's newest checkpoint, which is read in full."""
    try:
        saved = Checkpoint.latest(Path(run), world)
        saved.expect(SPEC, TRIAL.rule.moments)
        for param in SPEC.params:
            for kind in ("master", *TRIAL.rule.moments):
                saved.read(kind, param.name, Box.whole(param.shape))
    except CheckpointError as fault:
        return {"fault": str(fault)}
    return {"step": saved.step}


def save_without_space(world: World, run: str, step: int, stage: str, ranks: list[int], limit_bytes: int, background: bool = False) -> str:
    """The error of a save in which files of some ranks cannot grow beyond a limit from `stage`, a function of checkpoint.py, on."""
    state = build(TRIAL, [Layout(dp=world.size, zero=1)], world)[0]
    original = getattr(checkpoint, stage)

    def short(*arguments: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
        return original(*arguments)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank in ranks:
        setattr(checkpoint, stage, short)
    try:
        _save(world, Path(run), state, step, background=background)
    except CheckpointError as fault:
        return str(fault)
    finally:
        setattr(checkpoint, stage, original)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return ""


def save_and_die(world: World, run: str, step: int, stage: str, after: bool, rank: int, background: bool = False) -> None:
    """SIGKILL on one rank as a save comes to a function of checkpoint.py, or leaves it."""
    state = build(TRIAL, [Layout(dp=world.size, zero=1)], world)[0]
    original = getattr(checkpoint, stage)

    def die(*arguments: Any) -> None:
        if after:
            original(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    if world.rank == rank:
        setattr(checkpoint, stage, die)
    _save(world, Path(run), state, step, keep=2, background=background)


def save_and_die_at(world: World, run: str, step: int, touch: int | None, background: bool = False) -> int:
    """SIGKILL just before the save's `touch`-th access to the file system; its number of accesses where None."""
    state = build(TRIAL, [Layout()], world)[0]
    count = 0
    started = False

    def hook(event: str, _: object) -> None:
        nonlocal count
        if started and event in TOUCHES:
            if count == touch:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    sys.addaudithook(hook)
    started = True
    _save(world, Path(run), state, step, keep=2, background=background)
    started = False
    return count


def order_of_save(world: World, run: str, step: int) -> list[list[str]]:
    """The fsyncs and renames of a save, in order: ["fsync", path] and ["rename", from, to], paths from the run folder."""
    state, seen, root = build(TRIAL, [Layout()], world)[0], [], os.path.realpath(run)
    fsync, rename = os.fsync, os.rename

    def short(path: object) -> str:
        return os.path.relpath(str(path), root)

    def spy_fsync(handle: int) -> None:
        seen.append(["fsync", short(os.readlink(f"/proc/self/fd/{handle}"))])
        fsync(handle)

    def spy_rename(source: Any, target: Any) -> None:
        seen.append(["rename", short(os.path.realpath(source)), short(os.path.realpath(target))])
        rename(source, target)

    os.fsync, os.rename = spy_fsync, spy_rename
    try:
        _save(world, Path(run), state, step, keep=1)
    finally:
        os.fsync, os.rename = fsync, rename
    return seen


def make_data(world: World, place: str) -> None:
    """A text and a tokenizer for it. The text never changes: when float16 overflows depends on it."""
    text = Path(__file__).with_name("text.txt").read_text()
    (Path(place) / "text.txt").write_text(text)
    train_tokenizer(iter([text]), 300).save(f"{place}/tokenizer.json")


def open_tokens(world: World, configs: list[str], machines: list[str], damage: str = "") -> dict[str, Any]:
    """Open a run's token cache as ranks do, each with its config and on a machine of its name; the files that this rank hashed, and what it
    said. `damage`: a file whose hash is not the one expected."""
    hashed, usual = [], tokens.file_digest

    def sha256(path: Path) -> str:
        hashed.append(path.name)
        return "another" if path.name == damage else usual(path)

    with patch.object(tokens, "file_digest", sha256), patch.object(tokens.platform, "node", lambda: machines[world.rank]):
        try:
            cache = corpus.open_on_ranks(parse_config(configs[world.rank]), world)[1]
        except LongshiftError as fault:
            return {"hashed": hashed, "said": f"{type(fault).__name__}: {fault}"}
    return {"hashed": hashed, "said": len(cache)}


def make_tokenizer(world: World, place: str, vocab: int) -> None:
    """Another tokenizer."""
    train_tokenizer(iter([(Path(place) / "text.txt").read_text()]), vocab).save(f"{place}/tokenizer.json")


READ = Checkpoint.read
RESTORE = Optimizer.restore


def forget(kind: str) -> Callable[..., Tensor]:
    """A `Checkpoint.read` to which one kind is zero."""
    return lambda saved, of, name, box: READ(saved, of, name, box) * (of != kind)


def round_masters(saved: Checkpoint, kind: str, name: str, box: Box) -> Tensor:
    """A `Checkpoint.read` by way of bf16."""
    values = READ(saved, kind, name, box)
    return values.to(torch.bfloat16).to(values.dtype) if kind == "master" else values


def forget_steps(optimizer: Optimizer, read: Callable, was: str, steps: int) -> None:
    """An `Optimizer.restore` that begins the bias correction again."""
    RESTORE(optimizer, read, was, 0)  # pyright: ignore[reportArgumentType]


MUTANTS: dict[str, tuple[type, str, Callable]] = {
    "exp_avg": (Checkpoint, "read", forget("exp_avg")),
    "exp_avg_sq": (Checkpoint, "read", forget("exp_avg_sq")),
    "master": (Checkpoint, "read", round_masters),
    "steps": (Optimizer, "restore", forget_steps),
}


def run_with_kernel(world: World, config: str, name: str, **how: Any) -> str:
    """What `run_loop` prints on standard error where the attention kernel has this name."""
    said = StringIO()
    with patch.object(player_module, "kernels", lambda *_: (replace(FLASH, name=name),)), redirect_stderr(said):
        found = run_loop(world, config, **how)
    return found.get("fault", "") + said.getvalue()


def run_loop(world: World, config: str, resume: bool = False, stop_after: int | None = None, mutant: str | None = None) -> dict[str, Any]:
    """What the training loop yields; the last rank asks to stop after some step. Numbers as exact text. With the classes that anything
    unpickled meanwhile. The loss scale doubles after 2 good steps, so that float16 overflows now and then."""
    parsed = parse_config(config)
    usual = LossScale.__init__.__defaults__
    LossScale.__init__.__defaults__ = (FIRST_SCALE, 0, 2)
    unpickled: list[str] = []
    watching = True
    sys.addaudithook(lambda event, what: unpickled.append(str(what)) if watching and event.startswith("pickle.") else None)
    if mutant:
        owner, name, wrong = MUTANTS[mutant]
        original = getattr(owner, name)
        setattr(owner, name, wrong)
    rows = []
    try:
        stop = (lambda: len(rows) + 1 == stop_after) if world.rank == world.size - 1 else (lambda: False)
        context = loop.RunContext(Path(parsed.save.dir), world, StepTrace(None, world), stop)
        for step in loop.train_stage(next(stages_of(parsed)), context, resume):
            rows.append([step.step, float(step.loss).hex(), float(step.grad_norm).hex(), float(step.lr).hex(), step.cursor, step.skipped])
    except LongshiftError as fault:
        return {"fault": f"{type(fault).__name__}: {fault}"}
    finally:
        watching = False
        LossScale.__init__.__defaults__ = usual
        if mutant:
            setattr(owner, name, original)
    return {"rows": rows, "unpickled": unpickled}


def copied(world: World, layout: str) -> list[int]:
    """Bytes of this rank's copy of a state, and what the ledger says of it."""
    state, player = build(TRIAL, parse_layouts(layout), world)
    return [StateCopy(state.optimizer).nbytes, saved_bytes(player.steps)]


def save_without_a_copy(world: World, run: str, rank: int, of_the_map: bool) -> list[bool]:
    """Save when only one rank gets no memory for a copy, by what a GPU's allocator or a map of pages raises. Whether the checkpoint is
    whole at once, and whether the saver tries again."""
    state, _ = build(TRIAL, [Layout.parse("dp2.z1")], world)
    saver = Saver(Path(run), world, 3, background=True)
    error = OSError(errno.ENOMEM, "Cannot allocate memory") if of_the_map else OutOfMemoryError("no memory")
    with patch.object(saver_module, "StateCopy", side_effect=error if world.rank == rank else StateCopy):
        saver.save(1, state.optimizer, {}, None, last=False)
    return [Path(run, "LATEST").exists(), saver.background]


def run_in_the_background(world: World, config: str, limit_bytes: int | None = None, bad_step: int | None = None) -> dict[str, Any]:
    """A run whose files of checkpoints are written slowly: its last step, the steps that a save had under way when they ended, and what it
    said. `limit_bytes`: no larger file can be written; `bad_step`: of which the loss is not finite."""
    parsed, told, under_way, usual = parse_config(config), list[int](), list[int](), train_step
    native, before = checkpoint._write_tensors, resource.getrlimit(resource.RLIMIT_FSIZE)

    def slow(*given: Any) -> list[dict]:
        time.sleep(0.05)
        return native(*given)

    def step(*given: Any, **how: Any) -> Any:
        if len(told) + 1 == bad_step:
            raise NonFiniteError("loss nan")
        return usual(*given, **how)

    def busy(saver: Saver) -> bool:
        if found := saver._under_way is not None:
            under_way.append(len(told) + 1)
        return found and not saver._under_way.written  # pyright: ignore[reportOptionalMemberAccess]

    with ExitStack() as stack:
        stack.enter_context(patch.object(checkpoint, "_write_tensors", slow))
        stack.enter_context(patch.object(loop, "train_step", step))
        stack.enter_context(patch.object(Saver, "busy", property(busy)))
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
            stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)
        try:
            context = loop.RunContext(Path(parsed.save.dir), world, StepTrace(None, world))
            for done in loop.train_stage(next(stages_of(parsed)), context, resume=False):
                told.append(done.step)
        except LongshiftError as fault:
            return {"told": told, "under_way": under_way, "fault": f"{type(fault).__name__}: {fault}"}
    return {"told": told, "under_way": under_way, "fault": ""}


def poison(world: World, layout: str, rank: int, weight: str, precision: str = "float32", head_row: int | None = None) -> dict[str, Any]:
    """Two good steps, a third in which one rank's home has a NaN in `weight` (or every rank's a huge row of the output head), then the
    third again with the weight mended. What was said, whether home stayed as it was, and how the third step ended."""
    trial = replace(TRIAL, precision=precision)
    (state, player), batches = build(trial, [Layout.parse(layout)], world), trial.batches()
    if state.scale:
        state.scale.scale = 1.0  # with more, a float16 step is skipped and the scale is halved
    for batch in batches[:2]:
        train_step(state, batch, player)
    good = {(k, name, str(box)): v.clone() for name, box, _, kinds in state.optimizer.state() for k, v in kinds.items()}
    put = 0
    for name, box, _, kinds in state.optimizer.state():
        if head_row is not None and name == "lm_head.weight" and box and box.start[0] <= head_row < box.stop[0]:
            kinds["master"][head_row - box.start[0]] = 3e38
            put += 1
        if head_row is None and world.rank == rank and name == weight and box:
            kinds["master"].view(-1)[-1] = float("nan")
            put += 1
    before = [bits(v) for _, _, _, kinds in state.optimizer.state() for v in kinds.values()]
    cursor, said = state.cursor, ""
    try:
        train_step(state, batches[2], player)
    except NonFiniteError as fault:
        said = str(fault)
    after = [bits(v) for _, _, _, kinds in state.optimizer.state() for v in kinds.values()]
    same = before == after and state.optimizer.steps == 2 and state.cursor == cursor and all(s.grad is None for s in state.home.shards)
    for name, box, _, kinds in state.optimizer.state():
        kinds["master"].copy_(good["master", name, str(box)])
    return {"said": said, "same": same, "put": put, "third": train_step(state, batches[2], player).loss.hex()}


def third_loss(world: World, layout: str, precision: str = "float32") -> str:
    """The loss of the third of three good steps."""
    trial = replace(TRIAL, precision=precision)
    state, player = build(trial, [Layout.parse(layout)], world)
    if state.scale:
        state.scale.scale = 1.0
    return [train_step(state, batch, player).loss.hex() for batch in trial.batches()][-1]


def no_targets(world: World, layout: str, lengths: list[list[int]]) -> list[list[float]]:
    """(loss, gradient norm) of steps with documents of these lengths, and last whether all of the state is finite."""
    trial = replace(TRIAL, precision="float64", lengths=tuple(map(tuple, lengths)))
    state, player = build(trial, [Layout.parse(layout)], world)
    outcomes = [train_step(state, batch, player) for batch in trial.batches()]
    finite = all(bool(v.isfinite().all()) for _, _, _, kinds in state.optimizer.state() for v in kinds.values())
    return [*([o.loss, o.grad_norm] for o in outcomes), [float(finite)]]


def die_in_step(world: World, layout: str, rank: int, folder: str) -> None:
    """One rank ends without a word in the second step: in its backward or, where the layout changes, between two exchanges of a switch.
    The others write down what they see, and when, and end as the ranks of a run do."""
    layouts = parse_layouts(layout)
    trial = replace(TRIAL, edges=(8,)[: len(layouts) - 1], bucket_bytes=2_000, ahead_bytes=0)
    state, player = build(trial, layouts, world)
    batches = TRIAL.batches()
    train_step(state, batches[0], player)

    def leave(word: str) -> None:
        (Path(folder) / f"{world.rank}.writing").write_text(json.dumps([time.time(), word]))
        (Path(folder) / f"{world.rank}.writing").rename(Path(folder) / str(world.rank))
        os._exit(9)

    compute, post = player.table["compute"], SwitchTransfer.post

    def die_after_backward(op: Op) -> None:
        compute(op)
        if op.turn == "backward":
            leave("gone")

    def die_between_exchanges(self: SwitchTransfer, number: int) -> None:
        post(self, number)
        if number == 2 and not self.plan.sums:
            leave("gone")

    if world.rank == rank and len(layouts) > 1:
        SwitchTransfer.post = die_between_exchanges
    elif world.rank == rank:
        player.table["compute"] = die_after_backward
    try:
        train_step(state, batches[1], player)
    except RuntimeError as fault:
        leave(str(fault))


def fail(world: World, rank: int) -> None:
    if world.rank == rank:
        raise ZeroDivisionError("the reason")


def sleep(world: World, rank: int, seconds: float) -> int:
    if world.rank == rank:
        time.sleep(seconds)
    return os.getpid()


def leave(world: World, rank: int) -> None:
    """One rank ends without a word, the others wait."""
    if world.rank == rank:
        os._exit(0)
    time.sleep(60.0)


def pid(world: World) -> int:
    return os.getpid()
