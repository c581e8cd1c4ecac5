"""Seconds of a step with checkpoints written at once, in the background and not at all, and with batches drawn first or ahead.

One state on each world is trained by all schemes in turn, round after round, so that what else the machine does falls on all alike. A round
is an odd number of steps and the wait for its last checkpoint; a checkpoint is saved every second step.
"""

import json
import shutil
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from statistics import median, quantiles

import torch
from common import arguments, publish, say

from longshift.config_file import parse_config
from longshift.dist.fork import ForkedWorld
from longshift.dist.world import World
from longshift.documents.batch import Batches
from longshift.documents.tokenizer import train as train_tokenizer
from longshift.layout.layout import Layout
from longshift.state.saver import Saver
from longshift.step.player import Player
from longshift.step.update import State, not_finite, train_step
from longshift.trainer.build_run import build_player, build_state, open_data
from longshift.trainer.loop import BatchPrefetcher

EVERY = 2
SCHEMES = {  # when batches are drawn, when checkpoints are written
    "first, none": (False, None),
    "ahead, none": (True, None),
    "ahead, at once": (True, False),
    "ahead, background": (True, True),
}
CONFIG = """
model: {{path: {place}/model, init: scratch}}
data: {{train: [{{path: {place}/text.txt}}], tokenizer: {place}/tokenizer.json, max_len: 512, overlong: split, cache: {place}/cache}}
train: {{tokens_per_step: {tokens}, steps: 100000, lr: 1e-4}}
layout: {layout}
save: {{dir: {place}/run}}
"""


@cache
def built(world: World, config: str) -> tuple[Batches, State, Player]:
    parsed = parse_config(config)
    state = build_state(parsed, world, Path(parsed.save.dir))
    return open_data(parsed, world)[0], state, build_player(parsed, world, state, Path(parsed.save.dir))


@cache
def saver_of(world: World, folder: str, background: bool) -> Saver:
    return Saver(Path(folder), world, 1, background)


def play(world: World, config: str, scheme: str, folder: str, steps: int, number: int) -> dict[str, float]:
    """A round of a scheme: its seconds until all ranks are done, those of them inside saves, and the bytes that this rank saves."""
    (batches, state, player), (early, background) = built(world, config), SCHEMES[scheme]
    ready, saving = torch.zeros(1), 0.0
    ahead = BatchPrefetcher(batches, player)
    world.everyone.all_reduce(ready)
    began = time.perf_counter()
    for step in range(1, steps + 1):
        if early:
            train_step(state, *_swapped(ahead.take(state.cursor, step < steps), player))
        else:
            train_step(state, batches.at(state.cursor), player)
        if background is None:
            continue
        saver = saver_of(world, folder, background)
        busy = world.everyone.all_reduce(torch.tensor(int(saver.busy)), torch.distributed.ReduceOp.MAX)
        since = time.perf_counter()
        if step % EVERY == 0:
            assert not_finite(state, world) is None
            saver.save(number * steps + step, state.optimizer, {}, None, last=False)
        elif step == steps or not busy:
            saver.finish()
        saving += time.perf_counter() - since
    world.everyone.all_reduce(ready)
    seconds = time.perf_counter() - began
    nbytes = sum(view.nbytes for _, _, owned, views in state.optimizer.state() if owned for view in views.values())
    return {"seconds": seconds, "saving": saving, "nbytes": nbytes}


def _swapped(made: tuple, player: Player) -> tuple:
    """The arguments of a step whose batch was made ahead."""
    batch, ready = made
    return batch, player, ready


def prepare(place: Path, width: int, layers: int, vocab: int, files: int) -> None:
    """A model, a text of so many files of the standard library, and a tokenizer."""
    (place / "model").mkdir()
    sizes = {"vocab_size": vocab, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    rest = {"intermediate_size": 2 * width, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    about = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False, "rope_theta": 1e4}
    (place / "model/config.json").write_text(json.dumps(sizes | rest | about))
    texts = [path.read_text("utf-8", "ignore") for path in sorted(Path(json.__file__).parents[1].glob("*.py"))[:files]]
    (place / "text.txt").write_text("\n".join(texts))
    train_tokenizer(iter(texts), vocab).save(str(place / "tokenizer.json"))


def compared(world: ForkedWorld, config: str, layout: str, place: Path, rounds: int, steps: int) -> list[dict]:
    """A row a scheme. The first round, in which memory is allocated, is left out."""
    found: dict[str, list[dict]] = {scheme: [] for scheme in SCHEMES}
    for number in range(rounds + 1):
        order = list(SCHEMES)[number % len(SCHEMES) :] + list(SCHEMES)[: number % len(SCHEMES)]
        for scheme in order:
            folder = str(place / f"{layout} {scheme}")
            answers = world.call("background:play", 600.0, config=config, scheme=scheme, folder=folder, steps=steps, number=number)
            slowest = {key: max(answer[key] for answer in answers) for key in ("seconds", "saving")}
            found[scheme].append(slowest | {"nbytes": sum(answer["nbytes"] for answer in answers)})
        say(layout, number, {scheme: round(some[-1]["seconds"] / steps, 3) for scheme, some in found.items()})
    rows = []
    for scheme, some in found.items():
        seconds = [one["seconds"] / steps for one in some[1:]]
        low, _, high = quantiles(seconds, n=4) if len(seconds) > 1 else (seconds[0],) * 3
        row = {"layout": layout, "scheme": scheme, "step_s": median(seconds), "spread": (high - low) / median(seconds)}
        row["least_step_s"] = min(seconds)
        row["save_s"] = median(one["saving"] / (steps // EVERY) for one in some[1:]) if SCHEMES[scheme][1] is not None else None
        rows.append(row | {"checkpoint_mib": some[0]["nbytes"] / 2**20, "rounds": len(seconds)})
    return rows


def summary_of(rows: list[dict]) -> dict[str, dict[str, float]]:
    """By layout: step seconds of one scheme over those of another, and which share of the seconds of saving no step waits for."""
    summary: dict[str, dict[str, float]] = {"background_over_at_once": {}, "ahead_over_first": {}, "save_hidden_share": {}}
    for layout in dict.fromkeys(row["layout"] for row in rows):
        first, ahead, at_once, background = (
            next(row for row in rows if (row["layout"], row["scheme"]) == (layout, scheme)) for scheme in SCHEMES
        )
        summary["background_over_at_once"][layout] = background["step_s"] / at_once["step_s"]
        summary["ahead_over_first"][layout] = ahead["step_s"] / first["step_s"]
        summary["save_hidden_share"][layout] = 1 - background["save_s"] / at_once["save_s"]
    return summary


def main() -> int:
    options = arguments("Compare steps with checkpoints written at once and in the background.").parse_args()
    sizes, tokens, rounds, steps = ((64, 2, 300, 10), 256, 1, 3) if options.quick else ((384, 4, 4096, 60), 256, 11, 5)
    rows: list[dict] = []
    place = Path(tempfile.mkdtemp(prefix="longshift-background-"))
    try:
        prepare(place, *sizes)
        for layout in ("dp1", "dp2.z2"):
            config = CONFIG.format(place=place, tokens=tokens, layout=layout)
            with ForkedWorld(Layout.parse(layout).world) as world:
                rows += compared(world, config, layout, place, rounds, steps)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    publish("background", summary_of(rows), rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
