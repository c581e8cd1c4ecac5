"""Figures of campaigns, which `make test-faults JSON=out.json` keeps in one file: a part for each campaign, and a summary of all.

cases             what was tried
tracebacks, hangs, deaths, unlocated, silent   failures of a case, see `fuzz`
resumed, resumed_bitwise                       runs that were disturbed and went on; those with the weights of an undisturbed one
lost_steps, orphans, left_files                steps that were saved and are made again; processes, and files, that are left
"""

import fcntl
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

NAMES = (
    "cases",
    "tracebacks",
    "hangs",
    "deaths",
    "unlocated",
    "silent",
    "resumed",
    "resumed_bitwise",
    "lost_steps",
    "orphans",
    "left_files",
)


def keep(campaign: str, summary: Mapping[str, int], found: Mapping) -> None:
    """Write figures beside those of other campaigns, which may be played at the same time, where a file was asked for."""
    if path := os.environ.get("JSON"):
        with Path(path).open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            parts = json.loads(file.read() or "{}")
            parts[campaign] = {"summary": {name: count for name, count in summary.items() if name in NAMES}, **found}
            total = sum((Counter(part["summary"]) for name, part in parts.items() if name != "summary"), Counter())
            file.truncate(0)
            file.write(json.dumps(parts | {"summary": {name: total[name] for name in NAMES}}, indent=1) + "\n")
