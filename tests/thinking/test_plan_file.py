"""A run's `plan.json`: what goes on after trials, and files of other versions."""

import json
from pathlib import Path

import numpy as np
import pytest

from longshift.cluster.named import cluster
from longshift.config import Config
from longshift.forecast import layout_text
from longshift.layout.home_tiers import HomeTiers
from longshift.trainer.plan_file import PlanFile
from longshift.trainer.planned import chosen, keep
from longshift.trainer.resumed import going_on, named
from longshift.trainer.run_folder import RunFolder
from longshift.workload.given import Lengths
from longshift.workload.groups import parse_edges

THREE = PlanFile("auto", ("dp2", "tp2", "pp2"))


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        (([1.0, 1.0, 1.0], [1.1, 1.1, 1.1], [1.2, 1.2, 1.2]), 2),
        (([1.0, 1.0, 1.0], [0.9, 0.9, 0.9], [1.0, 1.0, 1.0]), 0),
        (([1.0, 1.1, 0.9], [0.8, 0.8, 0.8], [1.05, 1.15, 0.95]), 0),  # the difference is within what steps vary
        (([1.0, 1.1, 0.9], [1.2, 1.3, 1.1], [1.05, 1.15, 0.95]), 1),
        (([1.0], [1.1], [1.05]), 1),
    ],
)
def test_the_first_choice_goes_on_unless_another_is_faster_by_more_than_steps_vary(trials, chosen):
    plan = THREE
    for number, rates in enumerate(trials):
        assert plan.chosen is None
        assert plan.layout == THREE.choices[number]
        plan = plan.after(rates)
    assert plan.chosen == chosen
    assert plan.layout == THREE.choices[chosen]
    assert PlanFile.from_json(plan.to_json()) == plan


def test_a_chosen_home_is_kept_with_the_layouts(tmp_path: Path):
    """A run with `home: auto` goes on with what its plan says; asked for otherwise, it is planned again."""
    written = {"model": {"preset": "llama-3-8b"}, "data": {"train": ["x.txt"], "max_len": 4096}, "layout": "auto"}
    written |= {"train": {"tokens_per_step": 32768, "steps": 9, "lr": 1e-4}, "save": {"dir": str(tmp_path)}}
    auto, given = (Config.model_validate(written | {"home": home}) for home in ({"at": "auto", "moments": "bf16"}, "host"))
    lengths = Lengths.from_array(np.full(64, 4096))
    said: list[str] = []

    def ask(config: Config) -> tuple[Config, PlanFile]:
        said.clear()
        found, file = chosen(config, lambda ranks: cluster("1xh100"), lambda: lengths, said.append)
        assert file is not None
        keep(file, tmp_path, resume=False)
        return found, file

    found, file = ask(auto)
    assert (file.home, found.home.at.auto, found.home.at, found.home.moments) == ("host", False, HomeTiers("host"), "bf16")
    assert "home: auto: host" in said
    assert PlanFile.from_json(file.to_json()).config(auto) == found
    assert ask(auto) == (found, file)
    assert said == [f"layout: auto: as {tmp_path / 'plan.json'} says"]
    folder = RunFolder(tmp_path)
    folder.latest.parent.mkdir(parents=True, exist_ok=True)
    folder.latest.write_text("step")
    folder.config.write_text(found.to_yaml())
    for overrides in ([], ["home=auto"], ["home.at=auto"]):
        said.clear()
        on = going_on(auto, Path("run.yaml"), overrides, said.append)
        assert (on.home, on.layout, said) == (auto.home, auto.layout, [])
        again, file_again = ask(on)
        assert (file_again, again.home, again.layout) == (file, found.home, found.layout)
    assert named(auto, said.append) == []
    moved = going_on(auto, Path("run.yaml"), ["home=device"], said.append)
    assert moved.home.at == HomeTiers("device")
    by_hand, file = ask(given)
    assert (file.home, by_hand.home.moments) == (None, "float32")
    assert len(said) > 1


def test_a_plan_without_errors_is_read():
    told = json.loads(THREE.after([2.0, 3.0, 4.0]).to_json())
    del told["errors"]
    plan = PlanFile.from_json(json.dumps(told))
    assert (plan.rates, plan.errors) == ((3.0,), (0.0,))
    assert plan.after([1.0]).after([9.0]).chosen == 2


def test_layouts_with_other_packs_have_other_names():
    """By these a calibration tells the layouts of a run's steps apart."""
    one = [{"upto": "8K", "use": "dp2", "pack": "32K"}, {"upto": "32K", "use": "tp2"}]
    other = [one[0] | {"pack": "64K"}, one[1]]
    assert [layout_text(layout) for layout in (one, other, "dp2")] == [
        "dp2 <= 8K in 32K > tp2 <= 32K",
        "dp2 <= 8K in 64K > tp2 <= 32K",
        "dp2",
    ]
    assert " > ".join(map(str, parse_edges(one))) == layout_text(one)
