"""What every benchmark prints, and how: one JSON object on standard output with --json, a table without; progress on standard error.

{"benchmark": name, "command": ..., "machine": {...}, "versions": {...}, "commit": ..., "summary": {...}, "rows": [...]}

`tables.py --keep` puts such an object into `results/` and writes the tables of the docs anew.
"""

import argparse
import ctypes
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt
GIVE_BACK = 4 << 20  # bytes
PACKAGES = ("longshift", "torch", "numpy", "safetensors", "transformers", "deepspeed", "accelerate")


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the two flags that all benchmarks take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="a version of at most a minute")
    return parser


def say(*words: object) -> None:
    """Progress, on standard error."""
    print(f"[{time.strftime('%H:%M:%S')}]", *words, file=sys.stderr, flush=True)


def machine() -> dict:
    """Facts that numbers depend on; nothing that names the machine or its user."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu(),
        "cores": cores,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus,
        "system": f"{platform.system()} {platform.machine()}",
        "load_1min": round(os.getloadavg()[0], 1),
    }


def versions() -> dict[str, str]:
    """Python and the installed packages of PACKAGES."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The checked-out commit, "+changes" where files differ from it; None outside a git checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def give_freed_memory_back(at_least: int = GIVE_BACK) -> None:
    """glibc: hand memory of so many bytes and more to the system when it is freed, and keep 4 times as much at most, so that what is
    resident is what is needed and no accident of pools. At 1 MiB page faults take up to a third of the time
    (docs/dev/log.md, 2026-11-22)."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, at_least)
    libc.mallopt(M_TRIM_THRESHOLD, 4 * at_least)


def give_all_back() -> None:
    """glibc: hand all freed memory to the system now."""
    ctypes.CDLL(None).malloc_trim(0)


def publish(benchmark: str, summary: Mapping, rows: Sequence[Mapping], as_json: bool) -> None:
    """Print the result on standard output."""
    command = shlex.join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    report = {
        "benchmark": benchmark,
        "command": command,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "summary": summary,
        "rows": rows,
    }
    if as_json:
        print(json.dumps(report))
        return
    keys = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*keys, title=f"{benchmark} at {report['commit']}")
    for row in rows:
        table.add_row(*(_cell(row.get(key)) for key in keys))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for key, value in summary.items():
        console.print(f"{key}: {json.dumps(value, indent=2) if isinstance(value, dict) else _cell(value)}")


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return "" if value is None else str(value)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    return names[0] if names else platform.processor()
