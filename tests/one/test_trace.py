"""The trace of a streamed step: it loads, spans of a lane nest, and every event of the lists is in it."""

import json
from collections import Counter
from itertools import groupby
from pathlib import Path

import pytest
from trial import Trial, build

from longshift.dist.world import World
from longshift.layout.layout import Layout
from longshift.schedule.chunks import cut_chunks
from longshift.schedule.unit_events import backward_turns, event_lists, forward_turns
from longshift.spec.model import ModelSpec, Rope
from longshift.step.update import train_step
from longshift.stream.trace import Recorder, events_of, origin, save

SPEC = ModelSpec("llama", 61, 24, 2, 6, 3, 4, 40, 128, rope=Rope())


@pytest.mark.parametrize("words", ["disk.kv-offload", "every1"])
def test_every_event_of_a_step_is_in_its_trace(tmp_path: Path, words: str):
    trial, layout, recorder = Trial(SPEC, ((40, 21),), capacity=61), Layout.parse(f"chunk13.{words}"), Recorder()
    state, player = build(trial, [layout], World.alone())
    player.record(recorder)
    for batch in trial.batches() * 2:
        train_step(state, batch, player)
        player.record(None)
    save(tmp_path / "t.json", events_of(recorder.spans, 0, "rank 0", ("compute", "in", "out", "link"), origin(recorder.spans)))

    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    assert min(span["ts"] for span in spans) == 0
    assert all(span["dur"] >= 0 for span in spans)
    made = event_lists(SPEC, layout, layout.coord(0), 8, cut_chunks([40, 21], 13), None)
    units = range(SPEC.layers + 2)
    turns = [*forward_turns(units, SPEC.layers, layout.every), *backward_turns(units, SPEC.layers, layout.every)]
    played = [event for _, turn in turns for event in made.by_turn[turn]]
    wanted = Counter((event.kind, event.name, event.chunk, event.keys) for event in played)
    for (kind, name, chunk, keys), count in wanted.items():
        said = f"{name} {chunk}" + (f", {'rows' if name == 'loss' else 'keys'} {keys}" if keys >= 0 else "")
        lane = {"compute": "compute", "send": "link", "fetch": "in", "store": "out"}.get(kind)
        said = said if kind == "compute" else f"{kind} {said}"
        assert sum(names[span["tid"]] == lane and span["name"] == said for span in spans) == (count if lane else 0)
    assert len([span for span in spans if not span["name"].startswith("wait")]) == sum(
        count for (kind, *_), count in wanted.items() if kind not in ("free", "drop", "accumulate")
    )

    for _, row in groupby(sorted(spans, key=lambda s: (s["tid"], s["ts"], -s["dur"])), key=lambda s: s["tid"]):
        open_until: list[float] = []
        for span in row:
            while open_until and open_until[-1] <= span["ts"] + 1e-3:
                open_until.pop()
            end = span["ts"] + span["dur"]
            assert not open_until or (end <= open_until[-1] + 1e-3 and names[span["tid"]] == "compute"), span
            open_until.append(end)
