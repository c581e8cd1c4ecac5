"""Python's front door: every command as a function, whose value is what the command prints with --json; errors of one class; typed."""

import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

import longshift
import longshift as ls
from longshift.documents.tokenizer import train as train_tokenizer

CONFIG = """\
model: {{preset: tiny-llama}}
data:
  train: [{{path: {place}/*.txt}}]
  tokenizer: {place}/tokenizer.json
  max_len: 64
  overlong: split
  cache: {place}/cache
train: {{tokens_per_step: 64, steps: 2, lr: 1e-3, precision: float32}}
save: {{dir: {place}/run}}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("api")
    text = Path(re.__file__).read_text()
    for n in range(4):
        (place / f"{n}.txt").write_text(text[500 * n : 500 * n + 400])
    train_tokenizer(iter([text]), 300).save(str(place / "tokenizer.json"))
    (place / "run.yaml").write_text(CONFIG.format(place=place))
    return place


@pytest.fixture
def config(place) -> ls.Config:
    return ls.load_config(place / "run.yaml")


def printed(place: Path, *line: str) -> dict:
    """What a command prints with --json."""
    done = subprocess.run(
        [sys.executable, "-m", "longshift.cli", *line, "--json"], cwd=place, capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout)


def same(value, found: dict) -> bool:
    """Whether a value is frozen, and the JSON that a command printed, from which it is made again."""
    with pytest.raises(ValidationError, match="Instance is frozen"):
        setattr(value, next(iter(type(value).model_fields)), None)
    return json.loads(json.dumps(value.to_json())) == found and type(value).model_validate(found).to_json() == value.to_json()


def test_data_is_what_the_command_prints(place, config):
    found = ls.data(config)
    assert same(found, printed(place, "data", "run.yaml"))
    assert (found.documents, sum(bin.tokens for bin in found.histogram)) == (4, found.tokens)
    assert ls.data(place / "run.yaml", "data.max_len=32").caps != found.caps


def test_explain_is_what_the_command_prints(place, config):
    (found,) = ls.explain(str(place / "run.yaml"), "layout=dp2.z1")
    assert same(found, printed(place, "train", "run.yaml", "layout=dp2.z1", "--explain"))
    assert found.groups[0].layout == "dp2.z1"
    assert len(ls.explain(place / "run.yaml", "train.stages=[{steps: 1}, {steps: 1, train.tokens_per_step: 128}]")) == 2
    assert ls.explain(config)[0].groups[0].layout == "dp1"


def test_check_is_a_value(place, config):
    found = ls.check(config, against=ls.Layout("dp2"))
    assert same(found, found.to_json())
    assert {"pass", "rows", "tolerance"} <= found.to_json().keys()
    assert {"layout", "as", "grad"} <= found.to_json()["rows"][0].keys()
    assert found.passed
    assert [row.layout for row in found.rows] == ["dp1", "dp2"]
    assert max(row.grad for row in found.rows) == found.grad <= found.tolerance


def test_the_mfu_of_a_plan_is_of_the_tokens_that_its_steps_have(place):
    """A step of at least 8K tokens has one document of 30,000."""
    asked = ["data.max_len=32K", "model.preset=qwen3-0.6b", "train.precision=bf16", "layout=dp4.z3.recompute-full"]
    rates = []
    for tokens in ("8K", "240K"):
        plan = ls.plan(place / "run.yaml", *asked, f"train.tokens_per_step={tokens}", on="4xH100", lengths=[30000])
        assert plan.best is not None
        assert plan.best.groups is not None
        assert plan.mfu is not None
        rates.append(plan.mfu["6N"] * plan.best.seconds / sum(group.tokens for group in plan.best.groups))
    assert rates[0] == pytest.approx(rates[1])


def test_plan_is_what_the_command_prints(place, config):
    (place / "lengths").write_text("100\n" * 50 + "30000\n" * 5)
    asked = ["train.tokens_per_step=256K", "data.max_len=32K", "model.preset=qwen3-0.6b", "train.precision=bf16", "layout=auto"]
    found = ls.plan(place / "run.yaml", *asked, on="4xH100", lengths=[100] * 50 + [30000] * 5)
    assert same(found, printed(place, "plan", "run.yaml", *asked, "--on", "4xH100", "--lengths", "lengths"))
    assert found.fits
    assert found.best is not None
    assert found.best.groups is not None
    assert found.best.least_s < found.best.seconds < found.best.most_s
    assert found.rivals[0].times is not None
    assert found.best.layout in [way.layout for way in found.tried]
    none = ls.plan(place / "run.yaml", "data.max_len=4M", "model.preset=llama-3-70b", "data.tokenizer=null", on="1xH100", lengths=[1 << 22])
    assert (none.fits, none.best) == (False, None)
    assert same(none, none.to_json())


def test_a_run_is_trained_and_exported(place, tmp_path):
    assert [step.step for step in ls.train(place / "run.yaml", f"save.dir={tmp_path}/run")] == [1, 2]
    found = ls.export(tmp_path / "run", to=tmp_path / "model")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(found.files)
    assert same(found, printed(place, "export", f"{tmp_path}/run", "--to", f"{tmp_path}/again") | {"folder": f"{tmp_path}/model"})


def test_what_is_wrong_is_a_longshift_error(place, config, tmp_path):
    beyond = config.model_copy(update={"layout": ls.Layout("u99")})
    for wrong, says in (
        (lambda: ls.data("none.yaml"), "none.yaml"),
        (lambda: ls.data(config, "train.lr=1"), "overrides are of a config file"),
        (lambda: ls.check(config, against="zz4"), "is not a layout word"),
        (lambda: ls.check(config, against="pp9"), "at most pp4"),
        (lambda: ls.explain(beyond), "u99"),
        (lambda: next(ls.train(beyond)), "u99"),
        (lambda: ls.plan(config, on="3xZ9000"), "Z9000"),
        (lambda: ls.plan(config, on="2xH100", lengths=["a"]), "'a' is not a length in tokens"),  # pyright: ignore[reportArgumentType]
        (lambda: ls.plan(config, on="2xH100", lengths=[1.5]), "1.5 is not a length in tokens"),  # pyright: ignore[reportArgumentType]
        (lambda: ls.plan(config, on="2xH100", lengths=[[1, 2]]), "1, 2. is not a length"),  # pyright: ignore[reportArgumentType]
        (lambda: ls.plan(config, on="2xH100", lengths=[10**12]), "pieces of documents of up to 1,000,000,000,000 tokens"),
        (lambda: ls.export(tmp_path, to=tmp_path / "x"), "is not a run folder"),
        (lambda: ls.export(tmp_path, to=tmp_path / "x", precision="float8"), "one of float32, bf16, fp16, float64"),  # pyright: ignore[reportArgumentType]
        (lambda: ls.report(to=tmp_path / "x.html"), "report needs a run folder"),
        (lambda: next(ls.train(config, on_step=3)), "on_step=3: a function of"),  # pyright: ignore[reportArgumentType]
        (lambda: next(ls.train(config, resume=True)), "holds no checkpoint to resume from"),
        (lambda: ls.Layout("dp2.zz"), "is not a layout word"),
        (lambda: ls.Layout("dp2", tp=2), "the text is the whole layout"),  # pyright: ignore[reportCallIssue]
        (lambda: ls.Layout(None), "as in Layout\\('dp2.tp2'\\)"),  # pyright: ignore[reportArgumentType, reportCallIssue]
    ):
        with pytest.raises(ls.LongshiftError, match=says):
            wrong()


@pytest.mark.parametrize("text", ["dp2.tp2", "pp2:3-1.z1", "u4.chunk64K.host", "dp1"])
def test_a_layout_is_its_text(text):
    assert ls.Layout(text) == ls.Layout.parse(text)
    assert str(ls.Layout(text)) == ls.Layout(text).text == text
    assert hash(ls.Layout(text)) == hash(ls.Layout.parse(text))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"dp": 0}, "dp is a whole number of at least 1"),
        ({"tp": 2.5}, "tp is a whole number"),
        ({"chunk": "64K"}, "chunk is a whole number"),
        ({"zero": 9}, "zero=9. does not exist; z0 replicated"),
        ({"recompute": "foo"}, "recompute is one of none, selective, full, auto"),
    ],
)
def test_a_built_layout_has_values_that_exist(fields, why):
    with pytest.raises(ls.LongshiftError, match=why):
        ls.Layout(**fields)


def test_no_function_has_the_name_of_a_module():
    """So `import longshift.x.y as y` means the module, whatever was imported before."""
    modules = {module.name for module in pkgutil.iter_modules(longshift.__path__)}
    assert len(modules) > 20
    assert not modules & set(ls.__all__)


USE = """
from pathlib import Path

import longshift as ls

config: ls.Config = ls.load_config(Path("run.yaml"), ["train.lr=1e-3"])
for step in ls.train(config, resume=True):
    reveal_type(step.loss)
reveal_type(ls.Layout("dp2.tp2"))
reveal_type(ls.Layout(dp=2, tp=2, recompute="full", every=4).world)
reveal_type(ls.check(config, against="dp2").rows[0].grad)
reveal_type(ls.data("run.yaml").histogram[0].documents)
reveal_type(ls.explain(config)[0].groups[0].need.device.total)
reveal_type(ls.export("run", to="model").files)
plan = ls.plan("run.yaml", on="4xH100", lengths=[1, 2])
if plan.best is not None:
    reveal_type(plan.best.seconds)
reveal_type(ls.LongshiftError.exit_code)
reveal_type(config.train.lr)
reveal_type(config.layout)
held = ls.spread_weights(config.spec, ls.Layout("tp2"), "copies")
links = ls.Links(per_node=8, intra_bytes_s=300e9, inter_bytes_s=25e9)
reveal_type(ls.traffic(ls.switch_plan(held, held, links, itemsize=2)).intra_node_bytes)
"""
KNOWN = [
    "float",
    "Layout",
    "int",
    "float",
    "int",
    "int",
    "tuple[str, ...]",
    "float",
    "int",
    "float",
    "Layout | tuple[Edge, ...] | AutoLayout",
    "int",
]


def pyright(folder: Path) -> str:
    """What it says of a folder's programs, to which longshift is an installed package: what is not annotated there, it does not infer."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    known = os.environ | {"PYTHONPATH": str(Path(ls.__file__).parents[1])}
    return subprocess.run(command, cwd=folder, env=known, capture_output=True, text=True, check=False).stdout


def test_public_names_are_typed(tmp_path):
    """A program that uses them, under pyright's strict rules."""
    (tmp_path / "use.py").write_text(USE)
    settings = {"include": ["use.py"], "typeCheckingMode": "strict"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    said = pyright(tmp_path)
    assert re.findall(r'information: Type of ".*" is "(.*)"', said) == KNOWN, said
    assert "0 errors, 0 warnings" in said
    (tmp_path / "use.py").write_text("import longshift as ls\nls.Layout(dp=2, tpp=2)\nls.check('run.yaml')\n")
    assert "2 errors" in pyright(tmp_path)
