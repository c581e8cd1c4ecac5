"""What the first hours with a GPU are to answer, in one command: `python benchmarks/gpu/first_day.py`.

Parts follow each other by value. Each is a process of its own with its own deadline, and what it finds is written as it finds it, into
`first_day-DEVICE.json` with machine, versions and commit. Started again, it goes on with the parts that are not done at this commit.

    tests        tests/gpu
    kernels      attention kernels by shape: how exact, how fast, and which one is chosen
    layers-8K    one document (or a pack of many) through two layers of Llama 3 8B, by method; also 64K, 256K, 512K and 1M tokens
    rivals       the same layers at 8K tokens by Longshift's static layouts and by torch FSDP2, its checkpointing and torch.compile
    rows         how many rows have logits at one time: 1K, 2K or all 8K
    float8       matmuls of eight bits by codes, of factors that are rounded, and of bf16
    products     a matmul of eight bits by itself
    law          streaming at 512K tokens, two layers and four: what the ledger says of memory
    home         the training state in host memory against the device's
    longest      the longest document whose tier fits 128 GiB of host memory
    profiles     torch.profiler's tables of the three cases with the least model FLOP/s

`--device cuda` measures, and puts the forecast beside each figure; `--device fake` needs no GPU: it counts bytes and FLOP on a device that
is not there (fake_device.py), and foretells every figure for `--machine`; `--device cpu` tries all of it on a small model.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
PARTS = (
    *("tests", "kernels", "layers-8K", "rivals", "float8", "products", "layers-512K", "home", "rows"),
    *("layers-64K", "layers-1M", "law", "layers-256K", "longest", "profiles"),
)
DEADLINE_S = {"cuda": 180.0, "fake": 900.0, "cpu": 900.0}  # of a part
SHOWN = ("seconds", "tokens_per_s", "device_peak_gib", "host_peak_gib", "hidden_share")


def commit() -> str | None:
    """The checked-out commit, "+changes" where files differ from it; None outside a git checkout."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def write(path: Path, report: dict) -> None:
    """Put the report where it is, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(report, file, indent=1)
    Path(file.name).replace(path)


def rows_of(command: list[str], deadline_s: float, errors: Path) -> Iterator[dict]:
    """Rows that a process prints, a line each, and then how it ended: `state` done, deadline or fault."""
    began = time.monotonic()
    with errors.open("w") as stderr, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as child:
        timer = threading.Timer(deadline_s, child.kill)
        timer.start()
        assert child.stdout is not None
        try:
            for line in child.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
        finally:
            timer.cancel()
            if sys.exc_info()[0] is not None:
                child.kill()
    code = child.returncode
    seconds = time.monotonic() - began
    if code == 0:
        yield {"state": "done", "seconds": seconds}
    elif seconds >= deadline_s:
        yield {"state": "deadline", "seconds": seconds}
    else:
        yield {"state": "fault", "seconds": seconds, "why": errors.read_text().strip().splitlines()[-12:]}


def told(row: dict) -> str:
    """A row on one line: foretold and found, side by side."""
    kinds = [kind for kind in ("forecast", "counted", "measured") if kind in row]
    words = [f"{key} {value}" for key, value in row.items() if key not in kinds and not isinstance(value, dict)]
    for kind in kinds:
        shown = [f"{name} {row[kind][name]:.4g}" for name in SHOWN if isinstance(row[kind].get(name), float)]
        rates = row[kind].get("flops_per_s", {})
        shown += [f"TFLOP/s {name} {rate / 1e12:.0f}" for name, rate in rates.items()]
        words.append(f"{kind}: {', '.join(shown) or row[kind]}")
    return "; ".join(words)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "fake", "cpu"), default="cuda")
    parser.add_argument("--machine", help="preset whose figures are foretold; of a GPU that is there, its own")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, help="the file of results; traces and profiles lie in a folder beside it")
    parser.add_argument("--deadline", type=float, help="seconds of a part at the most; of a GPU's 180")
    parser.add_argument("--layers", type=int, default=2, help="of the model; fewer to try it")
    parser.add_argument("--methods", nargs="*", default=[], help="of the parts of layers; all where none is named")
    parser.add_argument("--commit", default=commit(), help="what is measured, where there is no git")
    options = parser.parse_args()
    deadline_s = options.deadline or DEADLINE_S[options.device]
    out = options.out or Path(f"first_day-{options.device}.json")
    report = json.loads(out.read_text()) if out.exists() else {"benchmark": "gpu/first_day", "device": options.device, "parts": {}}
    if report["device"] != options.device:
        parser.error(f"{out} has results of {report['device']}: give another --out")
    report["commit"] = options.commit
    folder = out.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for name in options.parts:
        known = report["parts"].get(name)
        if known and known["state"] == "done" and known["commit"] == options.commit:
            print(f"== {name}: done before", flush=True)
            continue
        print(f"== {name}", flush=True)
        part = report["parts"][name] = {"state": "begun", "commit": options.commit, "rows": []}
        command = [sys.executable, "-W", "ignore", str(HERE / "first_day_parts.py"), name, options.device, options.machine or "-"]
        command += [str(options.layers), str(deadline_s), str(out.resolve()), "--methods", *options.methods]
        for row in rows_of(command, deadline_s, folder / f"{name}.log"):
            if "versions" in row:
                report |= row
            elif "state" in row:
                part |= row
                print(f"-- {name}: {row['state']} after {row['seconds']:.0f} s", *row.get("why", ()), sep="\n   ", flush=True)
            else:
                part["rows"].append(row)
                print(f"   {told(row)}", flush=True)
            write(out, report)
    return 0 if all(report["parts"][name]["state"] == "done" for name in options.parts) else 1


if __name__ == "__main__":
    sys.exit(main())
