"""Checkpoints: saved under one layout and loaded under another, resumed to the bit, damaged, short of space, killed at every moment."""

import ast
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import FIRST_SCALE, SPEC, TRIAL, bits
from safetensors.torch import load_file

from longshift.dist.fork import ForkedWorld
from longshift.dist.world import World
from longshift.errors import CheckpointError, PeerError
from longshift.layout.box import Box
from longshift.layout.layout import Layout
from longshift.spec.model import ModelSpec, Rope
from longshift.state.checkpoint import Checkpoint
from longshift.state.manifest import overlap, read_manifest, render, sealed

KINDS = ("master", *TRIAL.rule.moments)
LAYOUTS = ("dp1", "dp2.z1", "tp2", "pp2", "u2.z3", "dp3", "dp3.z2", "dp2.tp2.z3")
DEADLINE_S = 60.0  # for a case of a second: the machine may be busy
Call = Callable[..., list]


@pytest.fixture(scope="session")
def call(worlds) -> Call:
    """call(size, function, **arguments): on every rank of a forked world."""

    def run(size: int, function: str, **arguments: object) -> list:
        return worlds(size).call(f"checkpoints:{function}", DEADLINE_S, **arguments)

    return run


def whole(run: Path) -> dict[str, bytes]:
    """Every value of a run's newest checkpoint, exact."""
    saved = Checkpoint.latest(run, World.alone())
    saved.expect(SPEC, KINDS[1:])
    return {f"{kind}/{p.name}": bits(saved.read(kind, p.name, Box.whole(p.shape))) for p in SPEC.params for kind in KINDS}


def test_what_a_file_may_not_hold_goes_to_the_next(call, tmp_path):
    """On a GPU a file is what goes through host memory at one time."""
    for name, limit in (("one", 1 << 30), ("many", 1000)):
        call(2, "begin", run=str(tmp_path / name), layout="dp2.z1", file_bytes=limit)
    files = sorted((tmp_path / "many/checkpoints/step-2").glob("*.safetensors"))
    assert {"rank-00000.safetensors", "rank-00000-1.safetensors", "rank-00001-2.safetensors"} < {path.name for path in files}
    for path in files:
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(value.nbytes for value in tensors.values()) <= 1000
    assert whole(tmp_path / "many") == whole(tmp_path / "one")
    ((_, _, wrong),) = call(1, "carry", source=str(tmp_path / "many"), target=str(tmp_path / "again"), layout="dp1")
    assert wrong == 0
    assert whole(tmp_path / "again") == whole(tmp_path / "one")


def hidden(run: Path) -> list[str]:
    return [path.name for path in (*run.glob(".*"), *run.glob("checkpoints/.*"))]


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_loads_any_checkpoint_to_the_bit(call, tmp_path, layout):
    """The truth is what each rank held as it saved, and one rank's file, read without Checkpoint. Then to every other layout and back."""
    size = Layout.parse(layout).world
    call(size, "begin", run=str(tmp_path / "a"), layout=layout)
    ((steps, held, _),) = call(1, "carry", source=str(tmp_path / "a"), target=str(tmp_path / "one"), layout="dp1")
    truth = tmp_path / "one/checkpoints/step-2/rank-00000.safetensors"
    one = load_file(truth)
    assert (steps, held) == (2, 3 * SPEC.parameters)
    assert set(one) == {f"{kind}|{p.name}|{Box.whole(p.shape)}" for p in SPEC.params for kind in KINDS}
    assert all(float(value.abs().max()) > 0 for value in one.values())
    for rank in range(size):
        for key, value in load_file(f"{tmp_path}/a-live-{rank}.safetensors").items():
            kind, name, box = key.split("|")
            full = Box.whole(SPEC.by_name[name].shape)
            assert bits(value) == bits(one[f"{kind}|{name}|{full}"][Box.parse(box).within(full)]), key
    for other in LAYOUTS:
        there, back = str(tmp_path / other), str(tmp_path / f"{other}-back")
        answers = call(Layout.parse(other).world, "carry", source=str(tmp_path / "a"), target=there, layout=other, truth=str(truth))
        assert sum(held for _, held, _ in answers) >= 3 * SPEC.parameters
        assert {(steps, wrong) for steps, _, wrong in answers} == {(2, 0)}
        call(size, "carry", source=there, target=back, layout=layout, truth=str(truth))
        assert whole(tmp_path / f"{other}-back") == whole(tmp_path / "a")


def test_home_is_saved_once(call, tmp_path):
    """Files of a replicated home hold every value once; a rank that speaks for nothing writes none."""
    call(2, "save_steps", run=str(tmp_path), layout="dp2", steps=[1])
    (file,) = (tmp_path / "checkpoints/step-1").glob("*.safetensors")
    assert sum(value.numel() for value in load_file(file).values()) == 3 * SPEC.parameters


# ---------------------------------------------------------------------------------------------------------------- resume

CONFIG = """
model: {{path: {place}/model, init: scratch}}
data:
  train: [{{path: {place}/text.txt}}]
  tokenizer: {place}/tokenizer.json
  max_len: 48
  overlong: split
  cache: {place}/cache
train: {{tokens_per_step: 96, steps: {steps}, lr: {lr}, warmup: 3, precision: {precision}, seed: {seed}}}
layout: {layout}
save: {{dir: {run}, every: {every}}}
"""
STEPS, STOP = 20, 8


@pytest.fixture(scope="module")
def place(call, tmp_path_factory) -> Path:
    """A text, a tokenizer and a model that knows its ids."""
    place = tmp_path_factory.mktemp("data")
    call(1, "make_data", place=str(place))
    (place / "model").mkdir()
    sizes = {"vocab_size": 307, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    rest = {"intermediate_size": 22, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu"}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False, **sizes, **rest}
    (place / "model/config.json").write_text(json.dumps(config))
    return place


def forge_manifest(path: Path, forge: Callable, by_the_run: bool = True) -> None:
    """Change a manifest and make its hash right again; and its seal, by the identity of the run, or not."""
    body = json.loads(path.read_text())
    del body["sha256"]
    seal = {"seal": body.pop("seal")}
    forge(body)
    path.write_text(render(sealed(path.parents[2], body) if by_the_run else seal | body))


def config(place: Path, run: Path, layout: str, precision: str = "float32", **other: object) -> str:
    given = {"steps": STEPS, "lr": 3e-3, "seed": 0, "every": 1000} | other
    return CONFIG.format(place=place, run=run, layout=layout, precision=precision, **given)


def train(call: Call, text: str, **arguments: object) -> list[list]:
    """The loop's rows, alike on all ranks."""
    answers = call(Layout.parse(re.search(r"^layout: (.*)$", text, re.M)[1]).world, "run_loop", config=text, **arguments)  # pyright: ignore
    assert all(answer == answers[0] for answer in answers), answers
    assert "fault" not in answers[0], answers[0]
    assert answers[0]["unpickled"] == []
    return answers[0]["rows"]


def state_of(run: Path) -> dict[str, torch.Tensor]:
    """Whole weights and moments of a run of the model above."""
    saved = Checkpoint.latest(run, World.alone())
    return {f"{kind}/{name}": saved.read(kind, name, Box.whole(shape)) for name, shape in shapes(saved) for kind in KINDS}


def shapes(saved: Checkpoint) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Weights and their shapes, by what the run says of its model."""
    fields = saved.facts["model"]
    spec = ModelSpec(**fields | {"rope": Rope(**fields["rope"]), "full_blocks": tuple(fields["full_blocks"])})
    saved.expect(spec, KINDS[1:])
    yield from ((p.name, p.shape) for p in spec.params)


def worst(ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == truth.keys()
    return max(float((ours[key] - truth[key]).norm() / truth[key].norm()) for key in truth)


def split_run(call: Call, place: Path, run: Path, before: str, after: str, precision: str, **arguments: object) -> list[list]:
    """A run that is stopped and resumed."""
    first = train(call, config(place, run, before, precision), stop_after=STOP)
    assert [row[0] for row in first] == list(range(1, STOP + 1))
    return first + train(call, config(place, run, after, precision), resume=True, **arguments)


@pytest.mark.parametrize(
    ("layout", "precision"), [("dp3.z2", "float32"), ("tp2", "bf16"), ("dp2.z1", "bf16"), ("u2.z3", "fp16"), ("pp2", "fp16")]
)
def test_resume_is_the_uninterrupted_run_to_the_bit(call, place, tmp_path, layout, precision):
    straight = train(call, config(place, tmp_path / "straight", layout, precision))
    split = split_run(call, place, tmp_path / "split", layout, layout, precision)
    assert len(straight) == STEPS
    assert split == straight  # step, loss, gradient norm, learning rate, cursor, skipped
    assert len({row[1] for row in straight}) > STEPS - 5  # losses that could differ
    ours, truth = state_of(tmp_path / "split"), state_of(tmp_path / "straight")
    assert {key: bits(value) for key, value in ours.items()} == {key: bits(value) for key, value in truth.items()}
    facts = [Checkpoint.latest(tmp_path / name, World.alone()).facts for name in ("split", "straight")]
    assert facts[0]["updates"] == facts[1]["updates"] == sum(not row[5] for row in straight)
    assert facts[0]["loss_scale"] == facts[1]["loss_scale"]
    if precision == "fp16":
        assert any(row[5] for row in straight[:STOP])
        assert any(row[5] for row in straight[STOP:])
        scale, good_steps = json.loads((tmp_path / f"split/checkpoints/step-{STOP}/manifest.json").read_text())["facts"]["loss_scale"]
        assert scale != FIRST_SCALE
        assert good_steps == 1


@pytest.fixture(scope="module")
def straight(call, place, tmp_path_factory) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final state of the uninterrupted float64 run."""
    run = tmp_path_factory.mktemp("straight")
    return losses(train(call, config(place, run, "dp2.z1", "float64"))), state_of(run)


def losses(rows: list[list]) -> list[float]:
    return [float.fromhex(row[1]) for row in rows]


def difference(found: list[float], truth: list[float]) -> float:
    assert len(found) == len(truth)
    return max(abs(a - b) / b for a, b in zip(found, truth))


@pytest.mark.parametrize("after", ["tp2", "pp2", "u2.z3", "dp1", "dp2.tp2.z3"])
def test_resume_under_another_layout_is_the_same_training(call, place, tmp_path, straight, after):
    rows = split_run(call, place, tmp_path, "dp2.z1", after, "float64")
    assert difference(losses(rows), straight[0]) < 1e-12
    assert worst(state_of(tmp_path), straight[1]) < 1e-12
    assert straight[0][-1] < straight[0][0] - 0.3  # it learns


@pytest.mark.parametrize("mutant", ["exp_avg", "exp_avg_sq", "master", "steps"])
def test_a_resume_that_forgets_something_is_noticed(call, place, tmp_path, straight, mutant):
    rows = split_run(call, place, tmp_path, "dp2.z1", "dp2.z1", "float64", mutant=mutant)
    assert difference(losses(rows), straight[0]) > 1e-6


def test_a_resume_opens_reads_and_parses_everything_once(call, place, finished, tmp_path):
    """Under another layout, so that every rank needs every file; each rank verifies its share of the files on the same handle."""
    run = shutil.copytree(finished, tmp_path / "run")
    keys = [key for file in json.loads((run / MANIFEST).read_text())["files"] for key in file["tensors"]]
    for found in call(2, "load_counted", config=config(place, run, "tp2", steps=3)):
        assert found["opened"] == {"rank-00000.safetensors": 1, "rank-00001.safetensors": 1}
        assert set(found["read"].values()) == set(found["parsed"].values()) == {1}
        assert {key.split("|")[0] for key in found["read"]} == set(KINDS)
        assert found["parsed"].keys() == {key.split("|")[2] for key in keys}
        assert found["facts"] == {"2": 1}


@pytest.fixture(scope="module")
def finished(call, place, tmp_path_factory) -> Path:
    """A run of two steps."""
    run = tmp_path_factory.mktemp("finished")
    train(call, config(place, run, "dp2.z1", steps=2 * STEPS), stop_after=2)
    return run


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, "the data changed since {saved} was written: put back data.train, "),
        (
            {"text": "def other(): pass\n" * 99},
            "the data changed since {saved} was written: put back data.train, ",
        ),
        (
            {"tokenizer": 280},
            "the tokenizer changed since {saved} was written: put the old tokenizer back",
        ),
        (
            {"precision": "float64"},
            "{saved} keeps its state in torch.float32, train.precision=float64 in ",
        ),
        ({"model": {"rope_theta": 500.0}}, "the model changed since {saved} was written: rope was "),
        (
            {"model": {"num_hidden_layers": 2}},
            "the model changed since {saved} was written: layers was 3 and is 2",
        ),
    ],
)
def test_what_makes_the_weights_or_the_cursor_mean_something_else_is_refused(call, place, finished, tmp_path, change, words):
    shutil.copytree(finished, tmp_path / "run")
    shutil.copytree(place, tmp_path / "place")
    if "text" in change:
        (tmp_path / "place/text.txt").write_text(change["text"])
    if "tokenizer" in change:
        call(1, "make_tokenizer", place=str(tmp_path / "place"), vocab=change["tokenizer"])
    if "model" in change:
        file = tmp_path / "place/model/config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change["model"]))
    given = {key: change[key] for key in ("seed", "precision") if key in change}
    text = config(tmp_path / "place", tmp_path / "run", "dp2.z1", **given)
    answers = call(2, "run_loop", config=text, resume=True)
    assert answers[0] == answers[1]
    assert answers[0]["fault"].startswith("CheckpointError: " + words.format(saved=tmp_path / "run/checkpoints/step-2"))
    assert (tmp_path / "run/LATEST").read_text() == "step-2\n"


def test_layout_rate_steps_precision_of_copies_and_saving_may_change(call, place, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    changed = config(place, tmp_path / "run", "tp2", "bf16", lr=1e-4, steps=5, every=1)
    assert [row[0] for row in train(call, changed, resume=True)] == [3, 4, 5]
    assert names(tmp_path / "run") == ["step-3", "step-4", "step-5"]


def test_a_resume_with_another_attention_kernel_says_so(call, place, tmp_path):
    """Once, on rank 0, and goes on; from a checkpoint that does not know its kernel nothing is said."""
    run = tmp_path / "run"
    text = {steps: config(place, run, "dp2", steps=steps, every=1) for steps in (3, 4, 5, 6)}

    def said(kernel: str, steps: int, **how: object) -> list[str]:
        return call(2, "run_with_kernel", config=text[steps], name=kernel, **how)

    assert said("one", 3) == ["", ""]
    facts = Checkpoint.latest(run, World.alone()).facts
    assert facts["attention"] == {"kernel": "one", "deterministic": True}
    assert said("one", 4, resume=True) == ["", ""]
    told = "longshift: attention was by one (deterministic) and goes on by other (deterministic): numbers may differ in their last bits"
    first, second = said("other", 5, resume=True)
    assert (first, second) == (f"{told} from a run that kept it\n", "")
    forge_manifest(run / "checkpoints/step-5/manifest.json", lambda body: body["facts"].pop("attention"))
    assert said("one", 6, resume=True) == ["", ""]


def test_a_run_beyond_its_last_step_is_not_resumed(call, place, finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    train(call, config(place, run, "dp1", steps=5), resume=True)
    (answer,) = call(1, "run_loop", config=config(place, run, "dp1", steps=4), resume=True)
    assert answer["fault"] == f"UsageError: {run} is at step 5 already: train.steps=4 cannot be reached; write a larger one"


@pytest.mark.parametrize(
    ("forge", "words"),
    [
        (lambda facts: facts.pop("updates"), "facts.updates: Field required"),
        (lambda facts: facts.update(cursor=-1), "facts.cursor: Input should be greater than or equal to 0"),
        (lambda facts: facts["fingerprints"].pop("data"), "facts.fingerprints.data: Field required"),
        (lambda facts: facts["config"]["train"].update(precision="int8"), "facts.config.train.precision: Input should be "),
    ],
)
def test_facts_that_are_wrong_with_a_right_hash_are_refused(call, place, finished, tmp_path, forge, words):
    run = shutil.copytree(finished, tmp_path / "run")
    forge_manifest(run / MANIFEST, lambda body: forge(body["facts"]))
    (answer,) = call(1, "run_loop", config=config(place, run, "dp1"), resume=True)
    assert answer["fault"].startswith(f"CheckpointError: {run / MANIFEST} is malformed: {words}")


def test_each_token_file_is_read_whole_by_one_rank(call, place, tmp_path):
    """Once by the rank that makes it; then by one rank of each machine, whose fault is everyone's."""
    shutil.copytree(place, tmp_path / "place", ignore=shutil.ignore_patterns("cache"))
    text = config(tmp_path / "place", tmp_path / "run", "dp3")
    both, one, two = ["tokens.bin", "offsets.bin"], ["a", "a", "a"], ["a", "b", "b"]

    def opened(machines: list[str], **damage: str) -> tuple[list, set]:
        answers = call(3, "open_tokens", configs=[text] * 3, machines=machines, **damage)
        return [answer["hashed"] for answer in answers], {answer["said"] for answer in answers}

    (made, said), (again, said_again) = opened(one), opened(one)
    assert made == [both + both, [], []]  # for the manifest, and before the run
    assert again == [both, [], []]
    assert said == said_again == {1}
    assert opened(two)[0] == [both, both, []]
    (fault,) = opened(two, damage="offsets.bin")[1]
    assert re.match("DataError: .*/offsets.bin is damaged: its contents do not give its SHA-256; to make it again: rm -r ", fault)


def test_ranks_with_other_tokens_are_refused(call, place, tmp_path):
    other = shutil.copytree(place, tmp_path / "place", ignore=shutil.ignore_patterns("cache"))
    (other / "text.txt").write_text("def other(): pass")
    configs = [config(where, tmp_path / "run", "dp2") for where in (place, other)]
    said = {answer["said"].split(": ", 2)[2] for answer in call(2, "open_tokens", configs=configs, machines=["a", "b"])}
    assert said == {"the tokens are not the same on all ranks: every machine needs the same files"}


# ---------------------------------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def good(call, tmp_path_factory) -> Path:
    """A run of two checkpoints, of two ranks, at steps 1 and 2."""
    run = tmp_path_factory.mktemp("good")
    call(2, "save_steps", run=str(run), layout="dp2.z1", steps=[1, 2])
    return run


@pytest.fixture
def copy(good, tmp_path) -> Path:
    return shutil.copytree(good, tmp_path / "run")


def flip(path: Path, byte: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def refused(call: Call, run: Path) -> str:
    """What all ranks say, of worlds of several sizes."""
    said = {answer["fault"] for size in (1, 2, 3) for answer in call(size, "open_latest", run=str(run))}
    assert len(said) == 1
    return said.pop()


FILE = "checkpoints/step-2/rank-00001.safetensors"
MANIFEST = "checkpoints/step-2/manifest.json"
INSTEAD = " An older checkpoint may serve: echo step-1 > {run}/LATEST"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: (run / FILE).write_bytes((run / FILE).read_bytes()[:-1]), "{run}/" + FILE + " is damaged: it has "),
        (lambda run: (run / FILE).write_bytes(b""), "{run}/" + FILE + " is damaged: it has 0 bytes, "),
        (lambda run: (run / FILE).unlink(), "{run}/" + FILE + " cannot be read: "),
        (lambda run: flip(run / FILE, 3, 0), "{run}/" + FILE + " is damaged: its SHA-256 differs from the manifest's."),
        (lambda run: flip(run / FILE, 100, 5), "{run}/" + FILE + " is damaged: its SHA-256 differs from the manifest's."),
        (lambda run: flip(run / FILE, -1, 7), "{run}/" + FILE + " is damaged: its SHA-256 differs from the manifest's."),
        (lambda run: (run / MANIFEST).unlink(), "{run}/" + MANIFEST + " is missing or damaged: "),
        (lambda run: (run / MANIFEST).write_bytes(b""), "{run}/" + MANIFEST + " is missing or damaged: "),
        (lambda run: (run / MANIFEST).write_text("[]"), "{run}/" + MANIFEST + " is missing or damaged: "),
        (lambda run: (run / MANIFEST).write_bytes((run / MANIFEST).read_bytes()[:-9]), "{run}/" + MANIFEST + " is missing or damaged: "),
        (lambda run: shutil.rmtree(run / "checkpoints/step-2"), "{run}/LATEST names 'step-2', which is not a checkpoint of this run."),
        (lambda run: (run / "LATEST").unlink(), "{run}/LATEST cannot be read: "),
        (lambda run: (run / "LATEST").write_text(""), "{run}/LATEST names '', which is not a checkpoint of this run."),
        (lambda run: (run / "LATEST").write_bytes(b"\xff\xfe"), "{run}/LATEST cannot be read: "),
        (lambda run: (run / "LATEST").write_text("../../etc"), "{run}/LATEST names '../../etc', which is not a checkpoint of this run."),
    ],
)
def test_damage_is_refused_by_all_ranks_in_the_same_words(call, copy, damage, words):
    damage(copy)
    said = refused(call, copy)
    assert said.startswith(words.format(run=copy))
    older = "step-1" if "step-2" in words else "step-2"
    assert said.endswith(INSTEAD.format(run=copy).replace("step-1", older))
    (copy / "LATEST").write_text("step-1\n")
    assert call(2, "open_latest", run=str(copy)) == [{"step": 1}] * 2


def test_no_bit_of_a_manifest_can_flip_unnoticed(good, tmp_path):
    """Also those that leave the JSON what it is."""
    run = shutil.copytree(good, tmp_path / "run")
    path = run / MANIFEST
    data = path.read_bytes()
    for number in range(0, 8 * len(data), 97):
        byte, bit = divmod(number, 8)
        path.write_bytes(data[:byte] + bytes([data[byte] ^ 1 << bit]) + data[byte + 1 :])
        with pytest.raises(CheckpointError, match=r"manifest\.json is (missing or )?damaged"):
            read_manifest(path.parent)
    path.write_bytes(data)
    assert read_manifest(path.parent)[0].step == 2


def first_key(body: dict) -> str:
    return next(key for key in body["files"][0]["tensors"] if key.startswith("master|model.embed_tokens.weight|"))


def rename_key(body: dict, to: str) -> None:
    tensors = body["files"][0]["tensors"]
    tensors[tensors.index(first_key(body))] = "master|model.embed_tokens.weight" + to


@pytest.mark.parametrize(
    ("forge", "words"),
    [
        (lambda body: body.update(format=1), "manifest.json has format 1, this version of longshift reads 2: use the one that wrote it."),
        (lambda body: body["files"][0].update(name="../../x"), "is malformed: files.0.name is '../../x': "),
        (lambda body: body["files"][0].update(name="/etc/passwd"), "is malformed: files.0.name is '/etc/passwd': "),
        (lambda body: body["files"][0].update(name="rank-00000.safetensors\n"), "is malformed: files.0.name is "),
        (lambda body: body["files"][0].update(bytes="many"), "is malformed: files.0.bytes is 'many': "),
        (lambda body: body["files"][0].pop("sha256"), "is malformed: files.0.sha256 is "),
        (lambda body: body["files"][0]["types"].update(master="I8"), "is malformed: files.0.types.master is 'I8': "),
        (lambda body: body["files"][0]["types"].update(master="F64"), " as F32, F64 was written."),
        (lambda body: body["files"][0]["types"].pop("exp_avg"), " as F32, None was written."),
        (lambda body: body.update(step=-1), "is malformed: step is -1: "),
        (lambda body: body.update(extra=1), "is malformed: extra is 1: "),
        (lambda body: body.update(files={}), "is malformed: files is {}: "),
        (lambda body: body["files"].append(body["files"][0]), " is there twice, as "),
        (lambda body: rename_key(body, ""), " is not KIND|WEIGHT|BOX."),
        (lambda body: rename_key(body, "|[0:x]"), " is not KIND|WEIGHT|BOX."),
        (lambda body: rename_key(body, "|[-3:1, 0:12]"), " is not KIND|WEIGHT|BOX."),
        (lambda body: rename_key(body, "|[3:3, 0:12]"), " is not KIND|WEIGHT|BOX."),
        (
            lambda body: rename_key(body, "|[0:20, 0:12]"),
            " is there twice, as [0:20, 0:12] and [19:37, 0:12].",
        ),
        (lambda body: rename_key(body, "|[0:20]"), " is there twice, as "),
        (
            lambda body: rename_key(body, "|[0:18, 0:12]"),
            " does not hold the boxes that manifest.json lists.",
        ),
        (lambda body: body["files"][0]["tensors"].remove(first_key(body)), " does not hold the boxes that manifest.json lists."),
        (lambda body: body["files"].pop(), ", [0:37, 0:12] is needed: incomplete, or of another model"),
    ],
)
def test_a_manifest_that_is_wrong_with_a_right_hash_is_refused(call, copy, forge, words):
    forge_manifest(copy / MANIFEST, forge)
    said = refused(call, copy)
    assert said.startswith(str(copy / "checkpoints/step-2"))
    assert words in said


OF_ANOTHER = "{run}/" + MANIFEST + " was not written by this run: it is of another run, or it, or identity in the run folder, was changed."


@pytest.mark.parametrize(
    "forge",
    [
        lambda body: body["facts"].update(updates=7),
        lambda body: body["files"][0].update(sha256="0" * 64),
        lambda body: body["files"].reverse(),
        lambda body: body.update(step=2),
    ],
)
def test_a_manifest_that_was_changed_without_the_identity_of_its_run_is_refused(call, copy, forge):
    """Its hash is right. The last is step 1 as step 2."""
    shutil.rmtree(copy / "checkpoints/step-2")
    (copy / "checkpoints/step-1").rename(copy / "checkpoints/step-2")
    before = (copy / MANIFEST).read_text()
    forge_manifest(copy / MANIFEST, lambda body: body.update(step=2))
    assert call(2, "open_latest", run=str(copy)) == [{"step": 2}] * 2  # by one that has the identity
    (copy / MANIFEST).write_text(before)
    forge_manifest(copy / MANIFEST, forge, by_the_run=False)
    assert refused(call, copy).startswith(OF_ANOTHER.format(run=copy))


def test_a_checkpoint_of_another_run_is_refused_and_a_run_that_was_moved_is_not(call, copy, tmp_path):
    call(2, "save_steps", run=str(tmp_path / "other"), layout="dp2.z1", steps=[1, 2])
    moved = (tmp_path / "other").rename(tmp_path / "moved")
    assert call(2, "open_latest", run=str(moved)) == [{"step": 2}] * 2
    shutil.rmtree(copy / "checkpoints/step-2")
    shutil.copytree(moved / "checkpoints/step-2", copy / "checkpoints/step-2")
    assert refused(call, copy) == OF_ANOTHER.format(run=copy) + INSTEAD.format(run=copy)
    (moved / "identity").unlink()
    assert refused(call, moved).startswith(f"{moved}/identity cannot be read: ")


def test_the_first_checkpoint_makes_the_identity_and_those_after_it_keep_it(call, copy):
    before = (copy / "identity").read_text()
    assert re.fullmatch(r"[0-9a-f]{64}\n", before)
    call(2, "save_steps", run=str(copy), layout="dp2.z1", steps=[3])
    assert (copy / "identity").read_text() == before
    (copy / "LATEST").unlink()  # nothing is left to go on from
    call(2, "save_steps", run=str(copy), layout="dp2.z1", steps=[3])
    assert (copy / "identity").read_text() != before
    assert call(2, "open_latest", run=str(copy)) == [{"step": 3}] * 2


def test_overlaps_are_found():
    boxes = [Box.parse(text) for text in ("[0:2, 0:4]", "[2:5, 0:2]", "[2:3, 2:4]", "[3:5, 2:4]", "[5:9, 0:4]")]
    assert overlap(boxes) is None
    for extra in ("[1:2, 3:4]", "[0:9, 0:1]", "[4:6, 3:9]", "[8:20, 3:4]"):
        assert overlap([*boxes, Box.parse(extra)]) is not None


# ---------------------------------------------------------------------------------------------------- space, death, order


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("ranks", [[0, 1], [1], [0]])
@pytest.mark.parametrize(("stage", "limit_bytes"), [("_write_tensors", 4096), ("_write_text", 100), ("_publish", 0)])
def test_a_full_disk_keeps_the_last_good_checkpoint(call, copy, stage, limit_bytes, ranks, background):
    before = whole(copy)
    how = {"stage": stage, "ranks": ranks, "limit_bytes": limit_bytes, "background": background}
    said = call(2, "save_without_space", run=str(copy), step=3, **how)
    if stage != "_write_tensors" and 0 not in ranks:
        assert said == ["", ""]  # rank 0 alone does these
        return
    assert said[0] == said[1]
    assert re.match(
        rf"checkpoint {copy}/checkpoints/step-3 cannot be written; the ones before it are untouched: rank {min(ranks)}: .*", said[0]
    )
    assert "File too large" in said[0]
    assert (copy / "LATEST").read_text() == "step-2\n"
    assert names(copy) == ["step-1", "step-2"]
    assert hidden(copy) == []
    assert whole(copy) == before
    call(2, "save_steps", run=str(copy), layout="dp2.z1", steps=[3])  # space was found
    assert call(2, "open_latest", run=str(copy)) == [{"step": 3}] * 2


def after_death(call: Call, run: Path) -> int:
    """The step of the checkpoint that a death left, once the next save of step 3 and its cleaning are seen to work."""
    (found,) = call(1, "open_latest", run=str(run))
    assert found["step"] in (2, 3), found
    call(1, "save_steps", run=str(run), layout="dp1", steps=[3], keep=2)
    assert call(1, "open_latest", run=str(run)) == [{"step": 3}]
    assert names(run) == ["step-2", "step-3"]
    assert hidden(run) == []
    return found["step"]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("stage", "after", "rank", "left"),
    [
        ("_sweep", False, 0, 2),
        ("_write_tensors", False, 1, 2),
        ("_write_tensors", True, 0, 2),
        ("_write_tensors", True, 1, 2),
        ("_publish", False, 0, 2),
        ("_publish", True, 0, 3),
        ("_purge", True, 0, 3),
    ],
)
def test_a_rank_killed_in_a_save_leaves_a_whole_checkpoint(call, copy, stage, after, rank, left, background):
    how = {"stage": stage, "after": after, "rank": rank, "background": background}
    with ForkedWorld(2) as world, pytest.raises(PeerError, match=f"rank {rank} died|gloo"):
        world.call("checkpoints:save_and_die", 20.0, run=str(copy), step=3, **how)
    assert after_death(call, copy) == left


@pytest.mark.parametrize("background", [False, True])
def test_a_death_at_any_touch_of_the_file_system_leaves_a_whole_checkpoint(call, good, tmp_path, background):
    """SIGKILL before every open, rename, mkdir and removal that a save does. LATEST moves once, and nothing goes before."""
    with ForkedWorld(1) as world:
        run = str(shutil.copytree(good, tmp_path / "all"))
        (touches,) = world.call("checkpoints:save_and_die_at", run=run, step=3, touch=None, background=background)
    assert touches > 15
    left = []
    for touch in range(touches):
        run = shutil.copytree(good, tmp_path / f"run-{touch}")
        with ForkedWorld(1) as world, pytest.raises(PeerError, match="rank 0 died"):
            world.call("checkpoints:save_and_die_at", run=str(run), step=3, touch=touch, background=background)
        left.append(after_death(call, run))
    assert left == sorted(left)
    assert set(left) == {2, 3}


# ---------------------------------------------------------------------------------------------------- in the background


def files_of(run: Path) -> dict[str, bytes]:
    """Tensor files of all checkpoints of a run, and where LATEST points."""
    files = [*run.glob("checkpoints/step-*/*.safetensors"), run / "LATEST"]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


@pytest.mark.parametrize("layout", ["dp1", "dp2", "dp2.z3", "tp2", "pp2"])
def test_a_checkpoint_from_the_copy_is_that_of_the_state_when_it_was_saved(call, tmp_path, layout):
    for name, background in (("one", False), ("other", True)):
        call(Layout.parse(layout).world, "begin", run=str(tmp_path / name), layout=layout, background=background, file_bytes=3000)
    manifests = [json.loads((tmp_path / name / MANIFEST).read_text()) for name in ("one", "other")]
    assert len({manifest.pop("seal") for manifest in manifests}) == len({manifest.pop("sha256") for manifest in manifests}) == 2
    assert manifests[0] == manifests[1]
    assert files_of(tmp_path / "one") == files_of(tmp_path / "other")


@pytest.mark.parametrize("layout", ["dp1", "dp2", "dp3.z1", "tp2", "pp2 > dp2.z3"])
def test_the_copy_has_the_bytes_that_the_ledger_counts(call, layout):
    found = call(Layout.parse(layout.split(" ")[0]).world, "copied", layout=layout)
    assert all(size == counted for size, counted in found)
    assert sum(size for size, _ in found) == 3 * 4 * SPEC.parameters


@pytest.mark.parametrize(("layout", "precision"), [("dp1", "float32"), ("dp2.z3", "bf16"), ("pp2", "float32")])
def test_training_goes_on_while_checkpoints_are_written(call, place, tmp_path, layout, precision):
    text = {name: config(place, tmp_path / name, layout, precision, steps=7, every=3) for name in ("at-once", "meanwhile")}
    train(call, text["at-once"])
    meanwhile = text["meanwhile"]
    answers = call(Layout.parse(layout).world, "run_in_the_background", config=meanwhile)
    assert all(answer["told"] == list(range(1, 8)) and not answer["fault"] for answer in answers)
    assert all({4, 7} <= set(answer["under_way"]) for answer in answers)  # a save had not been waited for when these ended
    assert files_of(tmp_path / "at-once") == files_of(tmp_path / "meanwhile")
    assert hidden(tmp_path / "meanwhile") == []


@pytest.mark.parametrize("of_the_map", [False, True])
def test_without_memory_for_a_copy_on_one_rank_all_save_at_once(call, tmp_path, of_the_map):
    assert call(2, "save_without_a_copy", run=str(tmp_path), rank=1, of_the_map=of_the_map) == [[True, False]] * 2


def test_a_disk_that_is_full_ends_the_run_as_it_would_at_once(call, place, tmp_path):
    text = config(place, tmp_path / "run", "dp2.z3", steps=7, every=3)
    for answer in call(2, "run_in_the_background", config=text, limit_bytes=4096):
        assert answer["fault"].startswith(
            f"CheckpointError: checkpoint {tmp_path}/run/checkpoints/step-3 cannot be written; the ones before"
        )
        assert "File too large" in answer["fault"]
        assert 4 <= answer["told"][-1] < 7
    assert names(tmp_path / "run") == []
    assert not (tmp_path / "run/LATEST").exists()


def test_a_loss_that_is_not_finite_leaves_the_checkpoint_that_was_under_way(call, place, tmp_path):
    text = config(place, tmp_path / "run", "dp2.z3", steps=7, every=3)
    for answer in call(2, "run_in_the_background", config=text, bad_step=4):
        assert answer["fault"].startswith("NonFiniteError: step 4: loss nan")
        assert answer["told"] == [1, 2, 3]
    assert (tmp_path / "run/LATEST").read_text() == "step-3\n"
    assert hidden(tmp_path / "run") == []


def test_everything_is_durable_before_it_is_named(call, good, tmp_path):
    run = shutil.copytree(good, tmp_path / "run")
    (seen,) = call(1, "order_of_save", run=str(run), step=3)
    scratch = "checkpoints/.step-3.writing"
    placed, moved = seen.index(["rename", scratch, "checkpoints/step-3"]), seen.index(["rename", ".LATEST.writing", "LATEST"])
    for path in (f"{scratch}/rank-00000.safetensors", f"{scratch}/manifest.json", scratch, ".LATEST.writing"):
        assert seen.index(["fsync", path]) < placed
    assert placed < seen.index(["fsync", "checkpoints"]) < moved < seen.index(["fsync", "."])
    purges = [i for i, event in enumerate(seen) if event[-1].endswith(".purged")]
    assert [seen[i][1] for i in purges] == ["checkpoints/step-1", "checkpoints/step-2"]
    assert purges[0] > seen.index(["fsync", "."])


def test_keep_purges_the_oldest_and_never_what_latest_names(call, tmp_path):
    run = tmp_path / "run"
    call(2, "save_steps", run=str(run), layout="dp2", steps=[2, 9, 10, 11], keep=2)
    assert names(run) == ["step-10", "step-11"]
    (run / "LATEST").write_text("step-10\n")  # a person goes back
    call(2, "save_steps", run=str(run), layout="dp2", steps=[5], keep=1)
    assert (run / "LATEST").read_text() == "step-5\n"
    assert names(run) == ["step-10", "step-11", "step-5"]  # those of the other way are not this one's to remove
    call(2, "save_steps", run=str(run), layout="dp2", steps=[10], keep=1)
    assert names(run) == ["step-10", "step-11"]
    assert call(2, "open_latest", run=str(run)) == [{"step": 10}] * 2


def test_the_same_step_again_replaces_it(call, good, tmp_path):
    run = shutil.copytree(good, tmp_path / "run")
    call(1, "begin", run=str(run), layout="dp1", steps=2)
    assert names(run) == ["step-1", "step-2"]
    assert whole(run) != whole(good)
    assert hidden(run) == []


# ------------------------------------------------------------------------------------------------------------ no pickles


PICKLERS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing"}


def picklers(source: str) -> list[str]:
    """What a source imports or calls that pickles. Pipes do unless they carry bytes."""
    found = []
    has_pipes = "from multiprocessing.connection import" in source
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.removeprefix("torch.").split(".")[0] in PICKLERS]
        if isinstance(node, ast.ImportFrom) and node.module != "multiprocessing.connection":
            found += [node.module or ""] if (node.module or "").removeprefix("torch.").split(".")[0] in PICKLERS else []
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            found += [text] if has_pipes and node.attr in ("send", "recv") else []
            found += [text] if text in ("torch.load", "torch.save") or re.search(r"_object(_list)?$|^pickle\b", text) else []
    return found


def test_nothing_is_pickled():
    """In no source; the run itself is watched by `train` above."""
    sources = list((Path(__file__).parents[2] / "src").rglob("*.py"))
    assert len(sources) > 40
    assert {path.name: found for path in sources if (found := picklers(path.read_text()))} == {}
    pipes = "from multiprocessing.connection import Pipe\nPipe()[0].recv()"
    calls = ["torch.load(x)", "torch.save(x, y)", "dist.all_gather_object(x, y)", "dist.broadcast_object_list(x)"]
    assert all(
        picklers(text) for text in [*calls, pipes, "import pickle", "from pickle import loads", "import torch.multiprocessing as mp"]
    )
