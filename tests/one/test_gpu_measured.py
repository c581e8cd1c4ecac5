"""What GPUs have measured (`benchmarks/results/gpu_first_day.json`) beside what the clock and the ledger say of the same steps now."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
known = sys.path[:]
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "gpu")]

import steps  # noqa: E402  # pyright: ignore[reportMissingImports]
from first_day_parts import PACK  # noqa: E402  # pyright: ignore[reportMissingImports]
from kept import RESULTS, result  # noqa: E402  # pyright: ignore[reportMissingImports]

sys.path[:] = known  # a script there has the name of one of benchmarks

from longshift.cluster.cluster import Cluster  # noqa: E402
from longshift.cluster.named import cluster  # noqa: E402
from longshift.config import Config  # noqa: E402
from longshift.errors import UsageError  # noqa: E402
from longshift.forecast import RunForecast, on_cluster  # noqa: E402
from longshift.layout.layout import Layout  # noqa: E402
from longshift.simulate.calibrate import band_of_errors, by_steps  # noqa: E402

KERNELS = [
    (gpu, row)
    for gpu, report in result("gpu_kernels")["sections"].items()
    for row in report["rows"]
    if row["part"] == "steps" and not (row["compile"] and row["commit"] == "6cbc36e")  # compiled before the loss was
]
WORKSPACES_GIB = 2 * 32 / 1024  # of cuBLAS on Hopper, of two threads; an admission counts them as the process's
ROWS = [
    (name, row)
    for name, report in result("gpu_first_day")["sections"].items()
    for row in report["rows"]
    if "layout" in row and "seconds" in row.get("measured", {}) and "fsdp2" not in row.get("system", "")
    if row.get("by_codes", True) or "precision" not in row  # the forecast of float8 multiplies codes
]


def case(row: dict[str, Any]) -> Any:
    lengths = PACK if "documents" in row else (row["tokens"],)
    compiled = row.get("system") == "longshift compiled"
    given = Layout.parse(row["layout"]), lengths, row.get("home", "device"), compiled, row.get("precision", "bf16")
    return steps.Case(steps.llama(row["layers"], sum(lengths)), *given)


@pytest.mark.parametrize(("name", "row"), ROWS, ids=lambda one: one if isinstance(one, str) else f"{one['part']} {one['layout']}")
def test_a_measured_step_takes_what_is_said(name: str, row: dict[str, Any]):
    found, said = row["measured"], steps.forecast(case(row), cluster(f"1x{name.split(',')[0].lower()}"))
    least = {"chunk4K": 0.9955, "chunk16K": 0.9955, "chunk64K": 0.985}.get(row["layout"].split(".")[0], 0.9998)  # puts are copied meanwhile
    assert least <= (found["device_peak_gib"] - WORKSPACES_GIB) / said["device_peak_gib"] <= 1.0002
    times = found["seconds"] / said["seconds"]
    if "home" in row:  # the forecast's host has the memory that two cores of a small machine had, the measured one 16 cores
        assert 0.62 <= times <= 0.75
    else:
        assert 0.85 <= times <= 1.01


@pytest.mark.parametrize(("gpu", "row"), KERNELS, ids=lambda one: one if isinstance(one, str) else str(one["lengths"]))
def test_steps_take_what_a_profile_of_their_gpu_says(gpu: str, row: dict[str, Any]):
    of = steps.Case(steps.llama(2, sum(row["lengths"])), Layout.parse(row["layout"]), tuple(row["lengths"]), compile=row["compile"])
    times = row["measured"]["seconds"] / steps.clocked(of, cluster(str(RESULTS / f"gpu_{gpu.lower()}_profile.json"))).seconds
    assert 0.97 <= times <= 1.10


def test_steps_of_a_corpus_take_what_a_profile_says():
    """Of a model with norms of queries and keys, in packs of a few hundred tokens to 32K: nothing was fitted to them but what a launch
    takes. cuDNN plans for a length when it first comes, a tenth of a second in steps of two. Calibrated by the trials' steps, the clock is
    nearer in those after them."""
    rows = [row for row in result("gpu_auto")["sections"]["qwen3-0.6b"]["rows"] if "lengths" in row]
    train = {"tokens_per_step": "64K", "steps": 1, "lr": 1e-5, "precision": "bf16"}
    data = {"train": [{"corpus": "python"}], "max_len": "16K", "overlong": "split"}
    at = {"model": {"preset": "qwen3-0.6b"}, "data": data, "train": train, "save": {"dir": "nowhere"}}
    machine, seconds = cluster(str(RESULTS / "gpu_h200_profile.json")), np.array([row["seconds"] for row in rows])
    configs = {str(row["layout"]): Config.model_validate({**at, "layout": row["layout"]}) for row in rows}

    def play(constants: Mapping[str, float], rows: list[dict] = rows) -> np.ndarray:
        known = {name: RunForecast(config, machine.moved(constants)) for name, config in configs.items()}
        return np.array([known[str(row["layout"])].step(row["lengths"]).seconds for row in rows])

    times, tried = seconds / play({}), np.array([row["step"] <= 12 for row in rows])
    assert 1.0 <= np.median(times) <= 1.08
    assert 0.97 <= min(times) <= max(times) <= 1.16
    fit = by_steps(lambda constants: play(constants, rows[: tried.sum()]), seconds[tried])
    after = (seconds / play(fit.constants))[~tried] - 1
    assert len(after) == 12
    assert max(abs(after)) <= 0.08
    assert sum(abs(after) <= band_of_errors(fit.held_back)) >= 10


def test_the_profile_of_a_single_gpu_plans_for_it_alone():
    """It was measured without links between devices."""
    machine: Cluster = cluster(str(RESULTS / "gpu_h200_profile.json"))
    assert set(machine.links) == {"device"}
    assert steps.clocked(case(ROWS[0][1]), machine).seconds > 0.05
    with pytest.raises(UsageError, match="was measured on one device and knows no links"):
        steps.clocked(case(ROWS[0][1]), on_cluster(machine, 8))
