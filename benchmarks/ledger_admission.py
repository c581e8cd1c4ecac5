"""Seconds of one core until it is known what every kind of rank of a large run needs, by name; each in a fresh process, after
imports. `ledger_admission.py NAME` does one of them; `--quick` the first."""

import json
import subprocess
import sys
import time
from dataclasses import replace

from longshift.layout.layout import Layout
from longshift.spec.families import preset
from longshift.spec.formats import FORMATS
from longshift.switch.itinerary import Itinerary
from longshift.switch.links import assumed
from longshift.switch.options import SwitchOptions
from longshift.weigh.needs import StepShape, largest_need, memory_needs
from longshift.workload.groups import Edge

_70B = preset("llama-3-70b")
_405B = replace(_70B, width=16384, layers=126, heads=128, ffn=53248)
CASES = {
    "70B, 512 ranks, tp8.pp4.dp16.z1": (_70B, "pp4.dp16.tp8.z1"),
    "70B, 512 ranks, dp512.z3": (_70B, "dp512.z3"),
    "405B, 16384 ranks, tp8.pp16.dp128.z1": (_405B, "pp16.dp128.tp8.z1"),
}
CAPACITY, MICROS = 8192, 8


def admit(name: str) -> dict:
    """The clock of one run, and the largest need."""
    spec, text = CASES[name]
    began = time.process_time()
    layout, formats = Layout.parse(text), FORMATS["bf16"]
    edges = [Edge(CAPACITY, layout)]
    itinerary = Itinerary(spec, edges, assumed(8), formats.compute_bytes, formats.home_bytes, SwitchOptions())
    shape = StepShape(itinerary, tuple(edges), formats, CAPACITY * layout.dp * MICROS, CAPACITY)
    found = memory_needs(shape, edges, "nccl")
    return {"seconds": time.process_time() - began, "kinds": len(found), "gib": largest_need(found).of("device") / 2**30}


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in CASES:
        print(json.dumps(admit(sys.argv[1])))
        return
    names = list(CASES)[:1] if "--quick" in sys.argv else list(CASES)
    found = {}
    for name in names:
        done = subprocess.run([sys.executable, __file__, name], stdout=subprocess.PIPE, check=True)
        found[name] = json.loads(done.stdout)["seconds"]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
