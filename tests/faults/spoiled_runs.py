"""A run folder whose checkpoints are spoiled, and the state that a resume takes from it: the surface "checkpoint" of `surfaces`.

The run is made once, by the product, and read as `--resume` reads it. Its files are damaged, or forged by a program that makes sizes and
checksums right again, which has the run's identity or has not. Without it, what is left may be refused, or read as exactly what the run
saved; else the case is `Silent`. With it a manifest may say anything, and may only not end in a traceback.
"""

import hashlib
import json
import os
import random
import re
import shutil
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fuzz import Silent, nested, odd_json, spoil_bytes, spoil_mapping
from safetensors.torch import load_file, save_file
from torch import Tensor

from longshift.config_file import load_config
from longshift.dist.world import World
from longshift.documents.tokenizer import train as train_tokenizer
from longshift.state import checkpoint
from longshift.state.manifest import render, sealed
from longshift.trainer import loop
from longshift.trainer.build_run import resume_or_build, stages_of
from longshift.trainer.facts import Facts, Fingerprints
from longshift.trainer.resume_config import resume_config
from longshift.trainer.run_folder import RunFolder, adopt
from longshift.trainer.step_trace import StepTrace

STEPS, FILE_BYTES = 3, 20_000
MODEL = {"vocab_size": 300, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
MODEL |= {"intermediate_size": 12, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu"}
MODEL |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
CONFIG = """
model: {{path: {place}/model, init: scratch}}
data: {{train: [{{path: {place}/text.txt}}], tokenizer: {place}/tokenizer.json, max_len: 48, overlong: split, cache: {place}/cache}}
train: {{tokens_per_step: 96, steps: {steps}, lr: {rate}, precision: float32}}
save: {{dir: {run}, every: 1, keep: {steps}}}
"""


@dataclass(frozen=True)
class Run:
    """`place`: a run folder `run`, and `other`, of another learning rate. `truth`: by step, facts and the bytes of tensors by key."""

    place: Path
    truth: dict[int, tuple[dict, dict[str, bytes]]]


@lru_cache
def made() -> Run:
    """The runs, trained in a child: a process that trains may not be forked."""
    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _make(place)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    truth = {}
    for step in range(1, STEPS + 1):
        folder = place / f"run/checkpoints/step-{step}"
        tensors = [found for file in sorted(folder.glob("*.safetensors")) for found in load_file(file).items()]
        truth[step] = json.loads((folder / "manifest.json").read_text())["facts"], {key: _bits(value) for key, value in tensors}
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert truth[1][1].keys() == truth[2][1].keys()
    assert truth[1][1] != truth[2][1]
    return Run(place, truth)


def _make(place: Path) -> None:
    checkpoint.FILE_BYTES = FILE_BYTES
    text = Path(json.__file__).read_text()
    (place / "text.txt").write_text(text)
    train_tokenizer(iter([text]), MODEL["vocab_size"] - 1).save(str(place / "tokenizer.json"))
    (place / "model").mkdir()
    (place / "model/config.json").write_text(json.dumps(MODEL))
    for name, rate in (("run", "1e-3"), ("other", "2e-3")):  # values of the other run are others
        file = place / f"{name}.yaml"
        file.write_text(CONFIG.format(place=place, run=place / name, steps=STEPS, rate=rate))
        config = load_config(file, [])
        (place / name).mkdir()
        adopt(RunFolder(place / name), config)
        world = World.alone()
        context = loop.RunContext(place / name, world, StepTrace(None, world))
        assert len(list(loop.train_stage(next(stages_of(config)), context, resume=False))) == STEPS


def case(random_: random.Random, place: Path) -> None:
    """A copy of the run, spoiled in one to three ways, and read."""
    run = place / "run"
    shutil.copytree(made().place / "run", run)
    ways = random_.choice((DAMAGES, DAMAGES, FORGERIES, FORGERIES, BY_THE_RUN))
    for _ in range(random_.choice((1, 1, 1, 2, 3))):
        random_.choice(ways)(random_, run)
    read(run, compare=ways is not BY_THE_RUN)


def read(run: Path, compare: bool = True) -> int:
    """Take the state of a run as a resume does, and return its step. Raises what that raises, and Silent where the state is none that the
    run has saved."""
    file = made().place / "run.yaml"
    config = resume_config(load_config(file, [f"save.dir={run}"]), file, [], lambda line: None)
    fingerprints = Fingerprints.model_validate(made().truth[1][0]["fingerprints"])
    step, state, facts = resume_or_build(next(stages_of(config)), World.alone(), fingerprints, run, resume=True)
    assert facts
    if compare:
        found = {f"{kind}|{name}|{box}": _bits(view) for name, box, _, views in state.optimizer.state() for kind, view in views.items()}
        saved, tensors = made().truth.get(step, ({}, {}))
        if (
            facts != Facts.model_validate(saved)
            or found != tensors
            or (state.cursor, state.optimizer.steps) != (facts.cursor, facts.updates)
        ):
            raise Silent(f"step {step} has other values than were saved")
    return step


def _bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


# Damage: what disks, copies and people do

Way = Callable[[random.Random, Path], object]


def _file(random_: random.Random, run: Path, kinds: str = "safetensors|json|LATEST|identity|config.yaml") -> Path:
    """A file that a resume reads; the newest checkpoint's more often than not."""
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and re.search(rf"({kinds})$", path.name)]
    newest = [path for path in files if path.parent.name == f"step-{STEPS}" or path.parent == run]
    return random_.choice(newest or files or [run / "LATEST"])


def _bytes(random_: random.Random, run: Path) -> None:
    path = _file(random_, run, random_.choice(("safetensors", "json", "LATEST", "identity")))
    path.write_bytes(spoil_bytes(random_, path.read_bytes() if path.exists() else b""))


def _gone(random_: random.Random, run: Path) -> None:
    """A file that is not there, or of which another has taken the place."""
    path, other = _file(random_, run, "safetensors|json|LATEST|identity"), _file(random_, run, "safetensors|json")
    path.unlink(missing_ok=True)
    if random_.random() < 0.6 and other.exists():
        path.parent.mkdir(exist_ok=True)
        shutil.copyfile(other, path)


def _folders(random_: random.Random, run: Path) -> None:
    """Steps swapped, renamed, put in place of others, or gone."""
    steps = sorted(run.glob("checkpoints/*"))
    if len(steps) < 2:
        return
    one, other = random_.sample(steps, 2)
    how = random_.randrange(4)
    if how == 0:
        one.rename(run / "aside")
        other.rename(one)
        (run / "aside").rename(other)
    elif how == 1:
        one.rename(one.with_name(random_.choice((f"step-{STEPS + 1}", "step-0", f"step-0{STEPS}", "step-x", ".step-9.writing"))))
    elif how == 2:
        shutil.rmtree(one)
        shutil.copytree(other, one)
    else:
        shutil.rmtree(one)


def _pointer(random_: random.Random, run: Path) -> None:
    """LATEST and BEST that name what they should not. An older step is a person's right."""
    text = random_.choice(
        ("step-1", "step-2\n", f"step-{STEPS + 1}", "step-0", "", "../checkpoints/step-1", "/", "step-1\0", "step-" + "9" * 5000)
    )
    (run / random_.choice(("LATEST", "LATEST", "BEST"))).write_text(random_.choice((text, f" {text} ", text + "\n" + text)))


def _of_the_other_run(random_: random.Random, run: Path) -> None:
    """A checkpoint, or a file of one, of another run of the same model and documents."""
    other, step = made().place / "other", f"checkpoints/step-{STEPS}"
    whole = random_.random() < 0.5
    for path in sorted((other / step).iterdir()):
        if whole or random_.random() < 0.5:
            (run / step).mkdir(exist_ok=True)
            shutil.copyfile(path, run / step / path.name)


def _deep(random_: random.Random, run: Path) -> None:
    """JSON that is deep, or no mapping."""
    depth = random_.choice((10, 800, 5000, 100_000))
    text = random_.choice(("[" * depth, "[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, json.dumps(odd_json(random_))))
    _file(random_, run, "json").write_text(text, errors="replace")


DAMAGES: tuple[Way, ...] = (_bytes, _bytes, _bytes, _gone, _folders, _pointer, _of_the_other_run, _deep)


# Forgeries: what a program does that makes sizes and checksums right again


def _forge(run: Path, change: Callable[[dict], object], by_the_run: bool = False, step: int = STEPS) -> None:
    """Change a manifest and make its checksum right, and its seal where the program is to have the run's identity."""
    path = run / f"checkpoints/step-{step}/manifest.json"
    try:
        body = json.loads(path.read_text())
        seal = body.pop("seal")
        del body["sha256"]
        body = change(body) or body
        text = render(sealed(run, body) if by_the_run else {"seal": seal, **body})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, checkpoint.CheckpointError):  # spoiled already
        return
    path.write_text(text, errors="replace")


def _manifest(random_: random.Random, by_the_run: bool = False) -> Callable[[dict], object]:
    """A change to a manifest's own words."""

    def key(body: dict) -> None:
        row = random_.choice(body["files"])
        at = random_.randrange(len(row["tensors"]))
        kind, name, box = row["tensors"][at].split("|")
        odd = ("[0:1]", "[0:99999999999999999999]", "[-1:3, 0:8]", "[]", "", "[" * 999, box.replace("0:", "1:", 1))
        row["tensors"][at] = random_.choice((f"{kind}|{name}|{random_.choice(odd)}", f"{name}|{kind}|{box}", f"grad|{name}|{box}", "x", ""))

    def file(body: dict) -> None:
        at = random_.randrange(len(body["files"]))
        names = ("rank-00009.safetensors", "../x", "/etc/passwd", "manifest.json", "rank-00000.safetensors\n", "\0", "x" * 300)
        body["files"][at] = random_.choice((spoil_mapping(random_, body["files"][at]), body["files"][at] | {"name": random_.choice(names)}))

    def order(body: dict) -> None:
        random_.shuffle(body["files"])
        body["files"][random_.randrange(len(body["files"])) :] = []

    def number(body: dict) -> None:
        which = random_.choice(("step", "cursor", "updates"))
        (body if which == "step" else body["facts"])[which] = random_.choice((0, 1, 2, STEPS, STEPS + 1, 10**30))

    def facts(body: dict) -> None:
        body["facts"] = spoil_mapping(random_, body["facts"])

    def deep(body: dict) -> None:
        body["facts"]["more"] = nested(random_, random_.choice((100, 900)))

    whole: Callable[[dict], object] = lambda body: spoil_mapping(random_, body)  # noqa: E731
    return random_.choice((key, key, file, order, number, number, facts, facts, deep, whole))


def _words(by_the_run: bool) -> Way:
    return lambda random_, run: _forge(run, _manifest(random_), by_the_run, random_.choice((STEPS, STEPS, STEPS, 1)))


def _tensors(by_the_run: bool) -> Way:
    """Tensors of other values, dtypes, shapes or names, or a header that is forged, in a file whose size and checksum are right."""

    def way(random_: random.Random, run: Path) -> None:
        path = _file(random_, run, "safetensors")
        try:
            if random_.random() < 0.5:
                save_file(_others(random_, load_file(path)), path, metadata={"format": "pt"})
            else:
                path.write_bytes(_header(random_, path.read_bytes()))
        except (OSError, ValueError, RuntimeError, checkpoint.SafetensorError, AttributeError):  # spoiled already
            return
        data = path.read_bytes()

        def change(body: dict) -> None:
            row = next(row for row in body["files"] if row["name"] == path.name)
            row |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            if random_.random() < 0.5:
                row["types"] = row["types"] | {random_.choice(sorted(row["types"])): random_.choice(("F64", "F32", "F16", "F8_E4M3"))}

        with_step = re.fullmatch(r"step-([0-9]+)", path.parent.name)
        if with_step and (path.parent / "manifest.json").exists():
            try:
                _forge(run, change, by_the_run, int(with_step[1]))
            except StopIteration:
                return

    return way


def _others(random_: random.Random, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    key = random_.choice(sorted(tensors))
    value = tensors[key]
    how = random_.randrange(6)
    if how == 0:
        return {name: found.double() for name, found in tensors.items()}
    if how == 1:
        return tensors | {key: value.half()}
    if how == 2:
        return tensors | {key: value * random_.choice((0.0, 2.0, float("nan"), float("inf")))}
    if how == 3:
        return tensors | {key: value.flatten()[: random_.choice((0, 1, 8))].clone()}
    del tensors[key]
    return tensors | ({key + "x": value} if how == 4 else {})


def _header(random_: random.Random, data: bytes) -> bytes:
    """A safetensors file whose header says something else."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = random_.choice(sorted(header))
    other = {"dtype": random_.choice(("F64", "I32", "BF16", "F4", 7)), "shape": random_.choice(([2**60, 2**60], [-1], [], [8], "x"))}
    other["data_offsets"] = random_.choice(([0, 4], [4, 0], [0, 2**62], [-8, 8], [0]))
    which = random_.choice(sorted(other))
    header[name] = random_.choice((header[name] | {which: other[which]}, odd_json(random_)))
    text = json.dumps(header).encode(errors="replace")
    told = len(text) if random_.random() < 0.8 else random_.choice((0, 8, 2**40, 2**63))
    return told.to_bytes(8, "little") + text + data[8 + size :]


FORGERIES: tuple[Way, ...] = (_words(False), _words(False), _tensors(False), _of_the_other_run, _folders)
BY_THE_RUN: tuple[Way, ...] = (_words(True), _words(True), _tensors(True))
