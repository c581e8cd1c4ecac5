"""Can a profile be trusted? Two runs in a row against each other, and what it sees of links and cores that were set on purpose.

Repeated: `longshift profile --fresh`, quick and full, twice each; a row for each family of curves with the median difference over all
points. Set on purpose: one quick profile inside the scale model (`scale_model.py`), as root, with shaped links and capped cores; left out,
with a word about it, elsewhere. Exit code 1 when a median or a setting is off by more than LIMIT.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import arguments, publish, say
from scale_model import Model, run

from longshift.cluster import files
from longshift.cluster.cluster import Cluster

LIMIT = 0.15
COMMAND = [sys.executable, "-m", "longshift.cli", "profile", "--fresh"]
MODEL = Model(nodes=2, per_node=2, cpu=0.4, memory_bytes=0, intra_bytes_per_s=40e6, inter_bytes_per_s=10e6)
TIMEOUT_S = 900.0


def measure(home: Path, quick: bool) -> tuple[Cluster, float]:
    """A fresh profile by the command, and the seconds that it took."""
    started, file = time.monotonic(), home / "profile.json"
    words = [*COMMAND, *["--quick"] * quick, "--json", "-o", str(file)]
    subprocess.run(words, env=os.environ | {"HOME": str(home)}, stdout=subprocess.DEVNULL, check=True)
    return files.load(file), time.monotonic() - started


def differences(a: Cluster, b: Cluster) -> dict[str, list[float]]:
    """Relative differences of two profiles at the points that both have, by family of curves."""
    found: dict[str, list[float]] = {}
    for name in a.curves.keys() & b.curves.keys():
        other = dict(zip(b.curves[name].points, b.curves[name].seconds))
        both = [(seconds, other[point]) for point, seconds in zip(a.curves[name].points, a.curves[name].seconds) if point in other]
        found.setdefault(name.split()[0], []).extend(abs(x - y) / max(x, y) for x, y in both)
    return found


def repeated(home: Path, quick: bool) -> list[dict]:
    how = "quick" if quick else "full"
    profiles, seconds = zip(*(measure(home, quick) for _ in range(2)))
    say(f"{how} profiles took {seconds[0]:.0f} and {seconds[1]:.0f} s")
    families = differences(*profiles)
    everything = [difference for family in families.values() for difference in family]
    return [
        {"what": f"{how} {name}", "points": len(values), "difference": statistics.median(values), "seconds": max(seconds)}
        for name, values in [*sorted(families.items()), ("all", everything)]
    ]


def on_model(model: Model, home: Path) -> Cluster:
    """A fresh quick profile by all ranks of a scale model. Ends the program where one of them fails."""
    file = home / "model.json"
    command = ["env", f"HOME={home}", *COMMAND, "--quick", "--json", "-o", str(file)]
    done = run(model, ["bash", "-c", f'exec "$@" > {home}/rank$RANK.out', "bash", *command], home / "logs", TIMEOUT_S)
    if done["exit_codes"] != [0] * model.ranks:
        raise SystemExit(f"the profile under the scale model ended with {done['exit_codes']}")
    return files.load(file)


def set_on_purpose(home: Path) -> list[dict]:
    """What a profile sees of MODEL."""
    seen = on_model(MODEL, home)
    pairs = [
        ("node link", MODEL.intra_bytes_per_s, seen.links["node"].bytes_per_s),
        ("network link", MODEL.inter_bytes_per_s, seen.links["network"].bytes_per_s),
        ("cores", MODEL.cpu, seen.device.cores or 0.0),
    ]
    return [{"what": f"scale model {what}", "asked": asked, "seen": got, "difference": abs(got / asked - 1)} for what, asked, got in pairs]


def main() -> int:
    options = arguments(__doc__.split("\n")[0]).parse_args()
    with tempfile.TemporaryDirectory(prefix="longshift-") as scratch:
        home = Path(scratch)
        rows = repeated(home, True)
        if not options.quick:
            rows += repeated(home, False)
            if os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc"):
                rows += set_on_purpose(home)
            else:
                say("no scale model here: it needs root and iproute2")
    bounded = {row["what"]: row["difference"] for row in rows if row["what"].endswith(" all") or "scale model" in row["what"]}
    publish("machine_profile", {**bounded, "limit": LIMIT}, rows, options.json)
    return 0 if max(bounded.values()) <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
