"""Calibration of a cluster: what moves, what steps that the clock made with other figures say, what a file keeps, what a plan takes."""

import shlex
from dataclasses import replace

import numpy as np
import pytest

from longshift.cluster import files
from longshift.cluster.cluster import Calibration, Cluster
from longshift.cluster.files import cluster as named
from longshift.cluster.network import collective_s
from longshift.config import Config
from longshift.config_file import parse_config
from longshift.errors import UsageError
from longshift.layout_plan import PlannedWay
from longshift.simulate.calibrate import BAND, ERROR, MOST, band_of_errors, by_steps
from longshift.simulate.rates import rates
from longshift.step_report import RunForecast, on_cluster
from longshift.trainer.auto_plan import other_ranks, plan, task_of, unplanned_stages
from longshift.workload.length_file import Lengths

LENGTHS = ((300, 900, 1500, 400) * 6, (2000,) * 9, (64, 128, 200, 32) * 40, (1000, 50, 70, 2000) * 5)
CONFIG = """
model: {{preset: {model}}}
data: {{train: [{{corpus: python}}], max_len: 2K, overlong: split}}
train: {{tokens_per_step: 16K, steps: 5, lr: 3e-4, precision: {precision}}}
layout: {layout}
save: {{dir: none}}
"""
CPU = ("cpu", "float32", "tiny-llama", ("dp2", "tp2", "u2"), LENGTHS)
H100 = ("h100", "bf16", "llama-3-8b", ("dp8.z3", "tp8"), LENGTHS[:2])


def player(preset: str, precision: str, model: str, layouts: tuple[str, ...], steps: tuple[tuple[int, ...], ...]):
    """The clock's seconds of the same steps under each layout, on a preset's cluster where its figures are moved."""
    cluster, configs = files.preset(preset), [parse_config(CONFIG.format(model=model, precision=precision, layout=one)) for one in layouts]

    def play(constants):
        forecasts = [RunForecast(config, cluster.moved(constants)) for config in configs]
        return np.array([forecast.step(lengths).seconds for forecast in forecasts for lengths in steps])

    return play


@pytest.mark.parametrize("preset", ["cpu", "h100"])
def test_a_figure_that_is_moved_moves_what_is_asked_of_it_and_nothing_else(preset):
    cluster = files.preset(preset)
    dtype, ranks = ("float32", cluster.devices_per_node) if preset == "cpu" else ("bf16", 8)

    def asked(made: Cluster) -> dict[str, float]:
        here = rates(made, dtype)
        found = {
            "matmul": here.matmul_s(4096, 1024, 1024),
            "attention": here.attention_s(1024, 1024**2 / 2, 8, 64, False),
            "memory": here.elementwise_s(1e7),
            "launch": here.launch_s,
            "node": collective_s(made, "all_gather", 1e9, ranks, ranks),
            "host": made.copy_s("host" if preset == "cpu" else "to_device", 1e6),
        }
        return {name: float(seconds) for name, seconds in found.items()}

    before = asked(cluster)
    for name in before.keys() - {"host"}:
        after = asked(cluster.moved({name: 2.0}))
        assert after == pytest.approx(before | {name: before[name] * (2.0 if name == "launch" else 0.5)}, rel=0.02)


@pytest.mark.parametrize(
    ("machine", "near", "shown"), [(CPU, 0.02, ("matmul", "attention")), (H100, 0.065, ("matmul", "node"))], ids=["cpu", "h100"]
)
def test_constants_of_steps_that_the_clock_made_are_found_again(machine, near, shown):
    """As near as the pull of the profile lets so many steps come. On GPUs some blocks take as long as their launches do, and hide what
    their matmuls take."""
    play = player(*machine)
    truth = {"matmul": 0.8, "attention": 0.6, "memory": 1.15, "node": 0.7, "launch": 1.4}
    found = by_steps(play, play(truth))
    assert len(found.constants) <= MOST
    assert play(found.constants) == pytest.approx(play(truth), rel=near)
    assert np.mean(np.abs(found.held_back)) < near < 0.1 < np.mean(np.abs(found.before))
    assert band_of_errors(found.held_back) <= max(ERROR, 2 * near)
    for name in shown:
        assert found.constants[name] == pytest.approx(truth[name], rel=5 * near), found.constants


def test_what_steps_do_not_show_stays_with_the_profile():
    """Without the pull, the noise of steps moves constants that they hardly show, past what any machine can be off."""
    play = player("cpu", "float32", "tiny-llama", ("dp2", "tp2"), LENGTHS)
    noise = np.exp(np.random.default_rng(0).normal(0.0, 0.1, len(LENGTHS) * 2))
    found = by_steps(play, play({"matmul": 0.8}) * noise)
    assert found.constants["matmul"] == pytest.approx(0.8, rel=0.12)
    assert {name: value for name, value in found.constants.items() if abs(np.log(value)) > 0.25 and name != "matmul"} == {}
    assert band_of_errors(found.held_back) > ERROR


def test_a_band_holds_four_of_five_steps_and_the_next_one_too():
    assert band_of_errors([0.01, -0.02, 0.03]) == ERROR
    assert band_of_errors([0.3, -0.1, 0.2, 0.1]) == 0.3  # of four the next is as likely to be the largest: the fifth of five
    assert band_of_errors([0.1 * n * (-1) ** n for n in range(1, 10)]) == pytest.approx(0.8)
    rng = np.random.default_rng(1)
    held = [abs(step[-1]) <= band_of_errors(step[:-1]) for step in rng.normal(0.0, 0.3, (2000, 6))]
    assert 0.8 < np.mean(held) < 0.86


def calibrated(preset: str = "cpu", **constants: float) -> Cluster:
    profile = files.preset(preset)
    return replace(profile, calibration=Calibration(constants, 0.07, files.figures(profile), ("dp2", "tp2"), (0.01, -0.07)))


def test_a_calibration_is_applied_once_and_leaves_its_band():
    made = calibrated(matmul=0.5)
    once = on_cluster(made, 2)
    assert once == on_cluster(once, 2)
    assert once.calibration is not None
    assert (once.calibration.band, len(once.calibration.errors)) == (0.07, 2)
    raw = on_cluster(files.preset("cpu"), 2)
    seconds = [float(rates(one, "float32").matmul_s(256, 256, 256)) for one in (once, raw)]
    assert seconds[0] == pytest.approx(2 * seconds[1])


@pytest.mark.parametrize("preset", ["cpu", "h100"])
def test_a_calibrated_file_gives_back_what_was_saved(tmp_path, preset):
    made, file = calibrated(preset, matmul=0.9, launch=1.5), tmp_path / "cluster.json"
    files.save(made, file)
    assert files.load(file) == made
    assert files.figures(made) == files.figures(files.preset(preset))
    assert "calibration" not in files.encode(files.preset(preset))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"fingerprint": "another"}, "has a calibration of other figures than its own; write it again with"),
        ({"constants": {"matmul": 0.0}}, "impossible: calibration.matmul"),
        ({"constants": {"speed": 1.0}}, "impossible: calibration.speed"),
        ({"band": float("nan")}, "impossible: calibration.band"),
    ],
)
def test_a_calibration_that_is_not_the_files_own_is_refused(tmp_path, wrong, reason):
    made, file = calibrated(matmul=0.9), tmp_path / "cluster.json"
    assert made.calibration is not None
    files.save(replace(made, calibration=replace(made.calibration, **wrong)), file)
    with pytest.raises(UsageError, match=reason) as refusal:
        files.load(file)
    assert len(str(refusal.value).splitlines()) == 1


def test_a_plan_takes_the_seconds_and_the_band_of_a_calibrated_cluster():
    config = parse_config(CONFIG.format(model="tiny-llama", precision="float32", layout="{auto: {ranks: 2, tp: 1, pp: 1, u: 1, ring: 1}}"))
    lengths = Lengths.from_array(np.array(LENGTHS[0]))
    plain, slow = (best_way(config, cluster, lengths) for cluster in (files.preset("cpu"), calibrated(matmul=0.5)))
    assert [way.most_s / way.seconds - 1 for way in (plain, slow)] == pytest.approx([BAND, 0.07])
    assert slow.seconds > 1.2 * plain.seconds


def best_way(config: Config, cluster: Cluster, lengths: Lengths) -> PlannedWay:
    """The best way that a plan finds."""
    best = plan(task_of(config, cluster, lengths)).result().best
    assert best is not None
    return best


def test_a_plan_takes_the_seconds_of_compiled_arithmetic():
    text = CONFIG.format(model="tiny-llama", precision="float32", layout="{auto: {ranks: 2, tp: 1, pp: 1, u: 1, ring: 1}}")
    configs = [parse_config(text, [f"train.compile={word}"]) for word in ("false", "true")]
    lengths, cluster = Lengths.from_array(np.array(LENGTHS[0])), files.preset("cpu")
    plain, compiled = (best_way(config, cluster, lengths).seconds for config in configs)
    assert 0.5 < compiled / plain < 0.995
    plain, compiled = (
        RunForecast(parse_config(text, ["layout=dp2", f"train.compile={word}"]), cluster).step(LENGTHS[0]).seconds
        for word in ("false", "true")
    )
    assert 0.5 < compiled / plain < 0.995


@pytest.mark.parametrize("precision", ["float64", "fp16", "float8"])
def test_a_plan_is_made_in_formats_that_a_profile_of_a_cpu_lacks(precision):
    text = CONFIG.format(model="tiny-llama", precision=precision, layout="{auto: {ranks: 2, tp: 1, pp: 1, u: 1, ring: 1}}")
    lengths, cluster = Lengths.from_array(np.array(LENGTHS[0])), files.preset("cpu")
    best = best_way(parse_config(text), cluster, lengths)
    plain = best_way(parse_config(text, ["train.precision=float32"]), cluster, lengths)
    assert best.seconds > 0
    assert precision != "float64" or 1.5 < best.seconds / plain.seconds < 2.5


def test_a_named_cluster_has_the_ranks_that_are_asked_for():
    """GPUs of a named cluster are as many as it says; CPU ranks share a machine."""
    config = parse_config(CONFIG.format(model="tiny-llama", precision="bf16", layout="{auto: {ranks: 128}}"))
    lengths = Lengths.from_array(np.array([100, 200]))
    with pytest.raises(UsageError, match="layout asks for 128 ranks, and NVIDIA H100 80GB HBM3 has 8"):
        task_of(config, named("8xH100"), lengths, all_devices=True)
    assert task_of(config, named("cpu"), lengths, all_devices=True).world == 128


def test_a_plan_says_which_stage_it_is_for_and_how_to_plan_another():
    """The words that are said make the last stage's documents those of the plan."""
    text = CONFIG.format(model="tiny-llama", precision="bf16", layout="dp2")
    stages = "[{steps: 5}, {steps: 7, data.max_len: 4K, model.rope: {type: theta, theta: 8e6}, layout: u2}]"
    assert unplanned_stages(parse_config(text)) is None
    config = parse_config(text, ["train.steps=12", f"train.stages={stages}"])
    note = unplanned_stages(config)
    assert note
    assert "stages keep their layouts" in note
    last = parse_config(text, [f"train.stages={stages}", *shlex.split(note.split(", add ")[1])])
    assert (last.data.max_len, last.train.stages, last.train.steps) == (4096, (), 7)
    assert last.model.rope == config.parts[1].model.rope


@pytest.mark.parametrize(
    ("layout", "asked", "said"), [("dp1", 8, True), ("u4.dp2", 8, False), ("dp16", 8, True), ("{auto: {ranks: 4}}", 4, False)]
)
def test_a_named_cluster_is_planned_for_whole(layout: str, asked: int, said: bool):
    config, eight = parse_config(CONFIG.format(model="tiny-llama", precision="bf16", layout=layout)), named("8xH100")
    assert task_of(config, eight, Lengths.from_array(np.array([100, 200])), all_devices=True).world == asked
    assert bool(other_ranks(config, eight)) == said
    if said:
        assert other_ranks(config, eight) == (
            f"the config's layout has {config.world} rank{'s' * (config.world > 1)}; this plan is for all 8 devices of the cluster"
        )
