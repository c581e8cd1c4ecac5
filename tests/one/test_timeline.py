"""A step recorded: the operations are the program, bytes are those predicted, both are in the trace, and a mistake of the player shows."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from trial import Trial, build, parse_layouts

from longshift.dist.world import World
from longshift.program.operations import Op, Program
from longshift.spec.model import ModelSpec, Rope
from longshift.step.player import Player
from longshift.step.update import train_step
from longshift.stream.trace import Recorder
from longshift.weigh.timeline import PredictedStep, Timeline, compare_step, predict_step, write_timeline

SPEC = ModelSpec("llama", 61, 64, 3, 4, 2, 16, 96, 4096, rope=Rope())
TRIAL = Trial(SPEC, ((700, 333, 900, 2),), "float32", capacity=1100)
LAYOUTS = ("dp1", "recompute-selective", "recompute-full.disk", "chunk300.disk", "dp1 > chunk300")


def recorded(
    layouts: str, mistake: Callable[[Player], object] | None = None, trial: Trial = TRIAL
) -> tuple[Timeline, PredictedStep, Program, Recorder]:
    """The first step of a state under these layouts."""
    (batch,), world, recorder, programs = trial.batches(), World.alone(), Recorder(), []
    with Timeline(world.device) as timeline:
        state, player = build(trial, parse_layouts(layouts), world)
        native = player.take
        player.take = lambda *given: programs.append(native(*given)) or programs[-1]
        if mistake:
            mistake(player)
        player.record(recorder)
        timeline.watch(player)
        train_step(state, batch, player)
        player.record(None)
        player.after = None
    return timeline, predict_step(player), programs[0], recorder


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_what_was_played_is_the_program_and_takes_the_bytes_predicted(layouts: str):
    timeline, told, program, _ = recorded(layouts)
    assert tuple(played.op for played in timeline.ops) == tuple(op for op, _ in told.ops) == program
    assert all(0 <= size - played.device_bytes <= 20_000 for played, (_, size) in zip(timeline.ops, told.ops))
    found = compare_step(timeline, told)
    assert found["within"], found
    assert all(played.start <= played.end for played in timeline.ops)


@pytest.mark.parametrize("layouts", ["recompute-full", "chunk300.disk"])
def test_a_trace_has_what_was_recorded_and_what_was_predicted(tmp_path: Path, layouts: str):
    timeline, told, program, recorder = recorded(layouts)
    write_timeline(tmp_path / "t.json", 3, timeline.ops, told, recorder)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(processes.values()) == ["rank 3, recorded", "rank 3, predicted"]
    for pid in processes:
        lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == pid}
        assert {"compute", "gather", "reduce"} <= lanes
        names = [event["name"] for event in events if event["ph"] == "X" and event["pid"] == pid]
        assert all(names.count(str(op)) >= 1 for op in program)
        counters = [event["args"]["device bytes"] for event in events if event["ph"] == "C" and event["pid"] == pid]
        assert len(counters) == len(program)
        assert min(counters) > 0
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events if event["ph"] == "X")
    assert ("attend_back 1, keys 0" in [event["name"] for event in events]) == ("chunk" in layouts)


def test_a_trace_shows_how_a_home_on_disk_is_read_and_written(tmp_path: Path):
    timeline, predicted, _, _ = recorded("dp1", trial=replace(TRIAL, home="disk"))
    write_timeline(tmp_path / "t.json", 0, timeline.ops, predicted)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    for pid in {event["pid"] for event in events}:
        lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == pid}
        assert {"home in", "home out"} <= lanes


def skipped(player: Player) -> None:
    """The player leaves one operation out."""
    native = player.play
    player.play = lambda program, *how: native(tuple(op for op in program if op != next(op for op in program if op.kind == "drop")), *how)


def nothing_dropped(player: Player) -> None:
    """What waited on the device for a backward is never forgotten."""

    def nothing(op: Op) -> None: ...

    player.table["drop"] = nothing


@pytest.mark.parametrize("mistake", [skipped, nothing_dropped])
def test_a_mistake_of_the_player_shows(mistake: Callable[[Player], object]):
    timeline, told, program, _ = recorded("recompute-full.host", mistake)
    found = compare_step(timeline, told)
    first = found["differences"][0]
    if mistake is skipped:
        assert len(timeline.ops) == len(program) - 1
        assert not found["within"]
        assert "was played for drop block" in first["op"]
    else:
        assert first["recorded"] > first["predicted"]
    assert compare_step(*recorded("recompute-full.host")[:2])["within"]
