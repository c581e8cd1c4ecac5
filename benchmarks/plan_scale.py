"""How long a plan's search takes, on one core: 8B on 8 GPUs, 70B on 512, 405B on 16,384, and a million lengths.

Every search is made in a process of its own (`plan_cases.py`): `seconds` and `import_s` are processor seconds, the
second of importing the thinking half, `peak_mib` the largest resident size, interpreter and numpy included. `--quick`: 8B only.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from common import arguments, publish, say

BOUNDS = {"8B on 8": 0.3, "70B on 512": 1.5, "405B on 16,384": 3.0, "a million lengths": 1.0}
PEAK_MIB, IMPORT_S = 2048, 0.3
QUICK = ("8B on 8", "a million lengths")
CASES = ("8B on 8", "8B on 64", "70B on 512", "405B on 16,384", "a million lengths")


def fresh(name: str) -> dict:
    """A row of `plan_cases` in a new process on one core."""
    say(name)
    script, where = Path(__file__).with_name("plan_cases.py"), {**os.environ, "OMP_NUM_THREADS": "1"}
    return json.loads(subprocess.run([sys.executable, script, name], stdout=subprocess.PIPE, check=True, env=where).stdout)


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    rows = [fresh(name) for name in (QUICK if args.quick else CASES)]
    over = [f"{row['case']}: {row['seconds']:.2f} s" for row in rows if row["seconds"] > BOUNDS.get(row["case"], float("inf"))]
    over += [f"{row['case']}: {row['peak_mib']:.0f} MiB" for row in rows if row["peak_mib"] > PEAK_MIB]
    summary = {
        **{name: min(row[name] for row in rows) for name in ("import_s", "first_turn_s")},
        "cases": {row["case"]: {key: row[key] for key in ("seconds", "candidates", "refused", "peak_mib")} for row in rows},
        "above_their_bounds": over + ([f"import: {IMPORT_S} s"] if min(row["import_s"] for row in rows) > IMPORT_S else []),
    }
    publish("plan_scale", summary, [{key: value for key, value in row.items() if key != "refused"} for row in rows], args.json)


if __name__ == "__main__":
    main()
