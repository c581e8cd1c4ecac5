"""What a rank waits for before its first step."""

import subprocess
import sys

STEP = """
import sys
from longshift.dist.world import World
from longshift.spec.families import preset
from longshift.step.update import train_step
from longshift.trainer.admission import settle
from trial import Trial, build, parse_layouts

trial = Trial(preset("tiny-llama"), ((9, 5),), "float32", capacity=16)
world = World.alone()
settle(world.device)
state, player = build(trial, parse_layouts("recompute-full"), world)
print(train_step(state, trial.batches()[0], player).loss > 1, "torch._dynamo" in sys.modules)
"""


def test_a_rank_does_not_import_torchs_compiler():
    """It would take 1.3 s of every rank."""
    done = subprocess.run([sys.executable, "-P", "-c", STEP], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "True False\n"
