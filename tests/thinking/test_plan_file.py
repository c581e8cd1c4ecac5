"""A run's `plan.json`: what goes on after trials, and files of other versions."""

import json
from pathlib import Path

import numpy as np
import pytest

from longshift.cluster.files import cluster
from longshift.config import Config
from longshift.layout.auto_layout import AutoLayout
from longshift.layout.home_tiers import HomeTiers
from longshift.step_report import layout_text
from longshift.trainer.auto_plan import resolve_layout
from longshift.trainer.plan_file import PlanFile, keep
from longshift.trainer.resume_config import name_changes, resume_config
from longshift.trainer.run_folder import RunFolder
from longshift.workload.groups import parse_edges
from longshift.workload.length_file import Lengths

FACTS = {"tried": [{"seconds": 2.0}, {"seconds": 2.02}, {"seconds": 2.04}]}
THREE = PlanFile("auto", ("dp2", "tp2", "pp2"), FACTS)


@pytest.mark.parametrize(("ratios", "chosen"), [((1.0, 1.0, 1.0), 0), ((1.1, 1.0, 1.1), 1), ((1.1, 1.1, 1.0), 2)])
def test_after_the_last_trial_the_fastest_goes_on(ratios, chosen):
    plan = THREE
    for number, ratio in enumerate(ratios):
        assert plan.chosen is None
        assert plan.layout == THREE.choices[number]
        plan = plan.after([3 * ratio, 4 * ratio, 5 * ratio], [3, 4, 5])
        assert PlanFile.from_json(plan.to_json()) == plan
    assert plan.chosen == chosen
    assert plan.layout == THREE.choices[chosen]
    assert [trial.typical_s for trial in plan.trials] == [2.0, 2.02, 2.04]


def test_a_chosen_home_is_kept_with_the_layouts(tmp_path: Path):
    """A run with `home: auto` goes on with what its plan says; asked for otherwise, it is planned again."""
    written = {"model": {"preset": "llama-3-8b"}, "data": {"train": ["x.txt"], "max_len": 4096}, "layout": "auto"}
    written |= {"train": {"tokens_per_step": 32768, "steps": 9, "lr": 1e-4}, "save": {"dir": str(tmp_path)}}
    auto, given = (Config.model_validate(written | {"home": home}) for home in ({"at": "auto", "moments": "bf16"}, "host"))
    lengths = Lengths.from_array(np.full(64, 4096))
    said: list[str] = []

    def ask(config: Config) -> tuple[Config, PlanFile]:
        said.clear()
        found, file = resolve_layout(config, AutoLayout(), lambda ranks: cluster("1xh100"), lambda: lengths, said.append)
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
        on = resume_config(auto, Path("run.yaml"), overrides, said.append)
        assert (on.home, on.layout, said) == (auto.home, auto.layout, [])
        again, file_again = ask(on)
        assert (file_again, again.home, again.layout) == (file, found.home, found.layout)
    assert name_changes(auto, said.append) == []
    moved = resume_config(auto, Path("run.yaml"), ["home=device"], said.append)
    assert moved.home.at == HomeTiers("device")
    by_hand, file = ask(given)
    assert (file.home, by_hand.home.moments) == (None, "float32")
    assert len(said) > 1


def test_plans_of_earlier_versions_are_read():
    """Their trials were kept as rates: what was chosen stays, and what was being tried is tried anew."""
    old = {"asked": "auto", "choices": ["dp2", "tp2", "pp2"], "facts": FACTS, "rates": [3.0], "chosen": None}
    assert PlanFile.from_json(json.dumps(old)) == THREE
    ended = PlanFile.from_json(json.dumps(old | {"rates": [1.0, 9.0, 1.0], "errors": [0.0, 0.1, 0.0], "chosen": 1}))
    assert (ended.layout, ended.chosen) == ("tp2", 1)
    with pytest.raises(ValueError, match="predicted to take"):
        PlanFile.from_json(json.dumps(old | {"facts": {"tried": []}}))


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
