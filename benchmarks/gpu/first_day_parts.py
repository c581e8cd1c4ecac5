"""One part of `first_day.py`, in a process of its own: prints a row of its findings a line, as JSON. What is foretold lies under
`forecast`, what the fake device counts under `counted`, what a device measures under `measured`."""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))

import bare as bare
import torch
import torch.nn.functional as F
from fake_device import fake_device
from steps import GIB, PRECISION, Case, K, build, clocked, count, few_chunks, forecast, llama, measure, peak_flops, wait, warm

from longshift.cluster.cluster import Cluster, Heads
from longshift.cluster.files import cluster
from longshift.cluster.host import core_count, cpu_name
from longshift.dist.world import allocator
from longshift.layout.blocks import BLOCK
from longshift.layout.layout import Layout
from longshift.model import float8
from longshift.model.attention import Attention, PackedAttention
from longshift.model.chosen_kernel import choose, kernels, probe
from longshift.model.kernels import FLASH, Kernel
from longshift.simulate.habits import habits
from longshift.simulate.rates import rates
from longshift.spec.model import attended

METHODS = {  # C: the chunk
    "plain": "dp1",
    "recompute-selective": "recompute-selective",
    "recompute-full": "recompute-full",
    "stream": "chunkC.host",
    "kv-offload": "chunkC.host.kv-offload",
    "fpdt": "chunkC.host.kv-offload.fpdt",
}
RIVALS = {"fsdp2": "dp1", "fsdp2 checkpoint": "recompute-full", "fsdp2 compiled": "dp1"}  # and the layout that computes as much
STREAMED = ("stream", "kv-offload", "fpdt")
PROFILED_TOKENS = 1024 * K  # of a step that there is no time to profile, too
HOST_BYTES = 128 * GIB
HOST_SHARE = 0.8  # of a machine's memory, that a tier may have
BY_DOCUMENT = replace(FLASH, name="flash, a call for each document")
WINDOW = 4 * K  # of the longest document where its whole attention takes too long
PACK = (300, 1700, 64, 2100, 900, 40, 1500, 1588)  # lengths of the documents of a pack of 8K tokens


@dataclass(frozen=True)
class Way:
    """How a part is played. `until`: when it has to end, on the monotonic clock; `results`: of the parts before;
    `methods`: that parts of layers are played by, all where there is none."""

    device: str
    machine: Cluster
    layers: int
    until: float
    results: Path
    methods: tuple[str, ...] = ()

    @property
    def real(self) -> torch.device:
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")

    def case(self, layout: str, tokens: int | tuple[int, ...], layers: int | None = None) -> Case:
        lengths = (tokens,) if isinstance(tokens, int) else tokens
        small = self.device == "cpu"
        if small:  # the same shape, 64 times as short
            lengths = tuple(max(1, length // 64) for length in lengths)
            layout = re.sub(r"chunk(\d+)K", lambda found: f"chunk{int(found[1]) * 16}", layout)
        return Case(llama(layers or self.layers, sum(lengths), small), Layout.parse(layout), lengths)

    def row(self, case: Case, trace: str | None = None, **more: object) -> dict:
        """What is foretold of a case, beside what is counted or measured."""
        row: dict = {**more, **case.told, "forecast": forecast(case, self.machine)}
        peak = row["forecast"]["device_peak_gib"]
        if self.device == "fake":
            with fake_device() as (device, held):
                row["counted"] = count(case, device, held)
            return row | {"over_ledger": row["counted"]["device_peak_gib"] / peak}
        profile = case.tokens < PROFILED_TOKENS
        if reason := self.no_room(row["forecast"], profile):
            return row | {"left_out": reason}
        path = self.results.with_suffix("") / f"{trace}.json" if trace else None
        row["measured"] = measure(case, self.real, path, profile)
        if "device_peak_gib" in row["measured"]:
            row["over_ledger"] = row["measured"]["device_peak_gib"] / peak
        if "seconds" in row["measured"]:
            row["over_forecast_s"] = row["measured"]["seconds"] / row["forecast"]["seconds"]
        return row

    def no_room(self, foretold: dict, profile: bool) -> str:
        """Why a case is not tried: the device's memory, or the time that is left. Empty where there is no reason."""
        if self.device != "cuda":
            return ""
        free = torch.cuda.mem_get_info()[0] / GIB
        if foretold["device_peak_gib"] > free:
            return f"the ledger says {foretold['device_peak_gib']:.1f} GiB, {free:.1f} are free"
        left, needs = self.until - time.monotonic(), (1.4 if profile else 1.1) * foretold["seconds"] + 15
        return f"about {needs:.0f} s, {left:.0f} are left" if needs > left else ""


def tests(way: Way) -> Iterator[dict]:
    """tests/gpu, which also run on the CPU."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", "-k", "cuda" if way.device == "cuda" else "cpu"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    words = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout)}
    yield {"code": done.returncode, **words, "last": done.stdout.strip().splitlines()[-30:] if done.returncode else []}


def attention_kernels(way: Way) -> Iterator[dict]:
    """Forward and backward of packs, as a block without windows computes them."""
    given = kernels(way.real, torch.bfloat16) if way.device != "fake" else kernels(torch.device("cuda"), torch.bfloat16)
    few = 16 if way.device == "cpu" else 1
    for heads in (Heads(32, 8, 128), Heads(32, 8, 64), Heads(16, 16, 128)):
        if way.device != "fake":
            chosen, why = choose(given, heads, torch.bfloat16, way.real, lambda seconds: seconds)
            errors = {one.name: vars(probe(one, torch.bfloat16, PRECISION, way.real, heads)) for one in given}
            yield {"heads": str(heads), "chosen": chosen.name, "why": why, "measured": errors}
        for lengths in ((300,), (1000,), (4 * K,), (16 * K,), (64 * K,), (K,) * 8, (300,) * 54, PACK, PACK * 8):
            lengths = tuple(max(1, length // few) for length in lengths)
            row = {"heads": str(heads), "documents": len(lengths), "tokens": sum(lengths)}
            row["forecast"] = foretold_attention(way.machine, heads, lengths)
            for kernel in (*(given if way.device != "fake" else given[:1]), BY_DOCUMENT):
                yield row | {"kernel": kernel.name} | attention_of(way, kernel, heads, lengths)


def foretold_attention(machine: Cluster, heads: Heads, lengths: tuple[int, ...]) -> dict:
    """Seconds and FLOP/s, causal scores counted once, by direction."""
    pairs, rate, found = sum(float(attended(n, None)) for n in lengths), rates(machine, PRECISION), {}
    for direction, work in (("forward", 4), ("backward", 10)):
        seconds = float(rate.attention_s(sum(lengths), pairs, heads.query, heads.width, direction == "backward"))
        found |= {f"{direction}_s": seconds, f"{direction}_flops_per_s": work * heads.query * heads.width * pairs / seconds}
    return found


def attention_of(way: Way, kernel: Kernel, heads: Heads, lengths: tuple[int, ...]) -> dict:
    """Seconds of a pack by direction, or what the fake device counts of both."""
    counts = (heads.query, heads.query, heads.key, heads.key)
    attention, tokens = Attention(kernel, heads.width**-0.5), sum(lengths)

    def inputs(device: torch.device) -> list[torch.Tensor]:
        make = torch.empty if device.type not in ("cpu", "cuda") else torch.randn
        found = [make(tokens, n, heads.width, device=device, dtype=torch.bfloat16) for n in counts]
        return [found[0], *(x.requires_grad_() for x in found[1:])]

    def forward(given: list[torch.Tensor]) -> torch.Tensor:  # by the attention of now
        return PackedAttention.apply(*given[1:], lengths, None, attention)  # pyright: ignore[reportReturnType]

    if way.device == "fake":
        with fake_device() as (device, held):
            given, attention = inputs(device), replace(attention, kernel=held.told(kernel))
            held.restart()
            torch.autograd.grad(forward(given), given[1:], given[0])
            return {"counted": {**held.work, "device_peak_gib": held.most[device.type] / GIB}}
    try:
        given = inputs(way.real)
        out = forward(given)
        found = {"forward_s": seconds_of(lambda: forward(given), way.real)}
        found["backward_s"] = seconds_of(lambda: torch.autograd.grad(out, given[1:], given[0], retain_graph=True), way.real)
    except RuntimeError as fault:
        found = {"fault": str(fault).splitlines()[0]}
    return {"measured": found}


def seconds_of(run: Callable[[], object], device: torch.device, times: int = 5) -> float:
    """The least of some."""
    best = float("inf")
    for _ in range(times + 1):
        wait(device)
        began = time.perf_counter()
        run()
        wait(device)
        best = min(best, time.perf_counter() - began)
    return best


def layers_of(tokens: int) -> Callable[[Way], Iterator[dict]]:
    """Two layers on a document of so many tokens, by method."""

    def layers(way: Way) -> Iterator[dict]:
        if way.device != "fake":
            yield {"measured": {"matmul_flops_per_s": peak_flops(way.real, 8192 if way.device == "cuda" else 512)}}
        chunk = {8 * K: 4, 64 * K: 16}.get(tokens, 64)
        names = ("kv-offload", "stream") if tokens >= 1024 * K else (*STREAMED, "recompute-full")
        for method in METHODS if tokens <= 64 * K else names:
            if way.methods and method not in way.methods:
                continue
            layout = METHODS[method].replace("chunkC", f"chunk{chunk}K")
            yield way.row(way.case(layout, tokens), f"trace-{method}-{tokens // K}K", method=method)
            if method in ("plain", "stream") and tokens == 8 * K:
                yield way.row(way.case(layout, PACK), method=method)

    return layers


def static_and_rivals(way: Way) -> Iterator[dict]:
    """The same step by Longshift's static layouts and by FSDP2."""
    for layout in ("dp1", "recompute-full"):
        yield way.row(way.case(layout, 8 * K), system="longshift")
    yield way.row(replace(way.case("dp1", 8 * K), compile=True), system="longshift compiled")
    for name, layout in RIVALS.items():
        case = way.case(layout, 8 * K)
        trainer = replace(habits(False, PRECISION, way.machine.device), compiled="compiled" in name)
        seconds = clocked(case, way.machine, trainer).seconds
        row = {"system": name, **case.told, "forecast": {"seconds": seconds, "tokens_per_s": case.tokens / seconds}}
        if way.device != "fake":
            row["measured"] = rival(name, case, way.real)
        yield row


def rival(name: str, case: Case, device: torch.device) -> dict:
    """Seconds of a rival's step, the fastest of some."""
    from rivals import build as build_rival  # FSDP2 takes seconds to import

    try:
        step = build_rival(name, case, device)
        loss = step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds = seconds_of(step, device, 3)
    except (RuntimeError, TypeError, AttributeError) as fault:
        return {"fault": str(fault).splitlines()[0]}
    found = {"seconds": seconds, "tokens_per_s": case.tokens / seconds, "loss": loss}
    if device.type == "cuda":
        found["device_peak_gib"] = torch.cuda.max_memory_allocated(device) / GIB
    return found


def rows_of_logits(way: Way) -> Iterator[dict]:
    """Head and loss in more blocks of rows, or fewer."""
    for rows in (1, 2, 8):
        case = way.case("dp1", 8 * K)
        loss_rows = rows * (16 if way.device == "cpu" else K)
        yield way.row(replace(case, spec=replace(case.spec, loss_rows=loss_rows)), method="plain", loss_rows=loss_rows)


def law(way: Way) -> Iterator[dict]:
    """Whether memory is what the ledger says, for two layers and for four."""
    for layers in (way.layers, 2 * way.layers):
        yield way.row(way.case(METHODS["kv-offload"].replace("chunkC", "chunk64K"), 512 * K, layers), method="kv-offload")


def eight_bits(way: Way) -> Iterator[dict]:
    """Matmuls of factors of eight bits: by codes where the device multiplies them, rounded and in bf16, and of bf16."""
    for precision, by_codes in (("bf16", False), ("float8", True), ("float8", False)):
        with patch.object(float8, "multiplies_codes", float8.multiplies_codes if by_codes else lambda x, weight: False):
            yield way.row(replace(way.case("dp1", 8 * K), precision=precision), by_codes=by_codes)


def products(way: Way) -> Iterator[dict]:
    """A matmul of bf16; of factors that are rounded; and by codes, which are made first, where the device multiplies them. Errors are those
    to rounded factors in float64."""
    if way.device == "fake":
        return
    few = 64 if way.device == "cpu" else 1
    for tokens, outputs, inputs in ((8 * K, 4 * K, 4 * K), (8 * K, 14 * K, 4 * K), (8 * K, 4 * K, 14 * K)):
        x, weight = (torch.randn(shape, device=way.real).bfloat16() for shape in ((tokens // few, inputs), (outputs // few, inputs)))
        exact = float8.rounded(x.double()) @ float8.rounded(weight.double(), BLOCK).mT
        found: dict = {"bf16_s": seconds_of(partial(F.linear, x, weight), way.real)}
        for name, by_codes in (("rounded", False), ("by_codes", True)):
            if by_codes and not float8.multiplies_codes(x, weight):
                continue
            with patch.object(float8, "multiplies_codes", lambda x, weight, by_codes=by_codes: by_codes):
                found[f"{name}_s"] = seconds_of(partial(float8.linear, x, weight, None), way.real)
                found[f"{name}_error"] = float((float8.linear(x, weight, None).double() - exact).norm() / exact.norm())
        yield {"tokens": tokens // few, "outputs": outputs // few, "inputs": inputs, "measured": found}


def homes(way: Way) -> Iterator[dict]:
    """The training state on the host, and on the device."""
    for home in ("device", "host"):
        yield way.row(replace(way.case("recompute-full", 16 * K), home=home), method="recompute-full")


def longest(way: Way) -> Iterator[dict]:
    """The longest document whose tier fits the host: with whole attention foretold, with a window counted or measured."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = {"fake": HOST_BYTES, "cuda": min(HOST_BYTES, int(HOST_SHARE * memory)), "cpu": 2**20}[way.device]
    for method in STREAMED:
        case = way.case(METHODS[method].replace("chunkC", "chunk64K"), 64 * K)
        found = case.longest(most)
        yield {"method": method, **found.told, "host_gib": most / GIB, "forecast": forecast(found, way.machine)}
        if method == "stream":
            yield way.row(case.windowed(WINDOW if way.device != "cpu" else 32).longest(most), method=method, host_gib=most / GIB)


def profiles(way: Way) -> Iterator[dict]:
    """The three cases with the least model FLOP/s: torch.profiler's tables by operation; on the clock, seconds by lane."""
    parts = json.loads(way.results.read_text())["parts"]
    rows = [row for part in parts.values() for row in part["rows"] if "forecast" in row and "layout" in row]
    rows = [row for row in rows if not row.keys() & {"system", "window", "documents"}]
    kind = "forecast" if way.device == "fake" else "measured"
    slowest = sorted((row for row in rows if "flops_per_s" in row.get(kind, {})), key=lambda row: row[kind]["flops_per_s"]["causal"])
    for row in slowest[:3]:
        case = replace(way.case("dp1", row["tokens"]), layout=Layout.parse(row["layout"]), home=row.get("home", "device"))
        told = {"method": row.get("method"), **case.told}
        if way.device == "fake":
            time_ = clocked(case, way.machine)
            lanes = {lane: time_.busy_s(lane) for lane in sorted({piece.lane for pieces in time_.played for piece in pieces})}
            yield told | {"forecast": {"seconds": time_.seconds, "lanes": lanes}}
            continue
        built = build(case, way.real)
        built.step(warm(case))
        with torch.profiler.profile() as profile:
            built.step(few_chunks(case))
            wait(way.real)
        built.close()
        order = "self_cuda_time_total" if way.device == "cuda" else "self_cpu_time_total"
        yield told | {"measured": {"table": profile.key_averages().table(sort_by=order, row_limit=30).splitlines()}}


def machine() -> dict:
    """Facts that numbers depend on; nothing that names the machine or its user."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    memory_gib = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB, 1)
    system = f"{platform.system()} {platform.machine()}"
    return {"gpus": gpus, "cpu": cpu_name(), "cores": core_count(), "memory_gib": memory_gib, "system": system}


def versions() -> dict:
    driver = {}
    if torch.cuda.is_available():
        driver = {"cudnn": str(torch.backends.cudnn.version()), "capability": str(torch.cuda.get_device_capability())}
    return {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda, **driver}


LAYERS = {
    f"layers-{tokens // K}K" if tokens < K * K else "layers-1M": layers_of(tokens) for tokens in (8 * K, 64 * K, 256 * K, 512 * K, K * K)
}
PARTS = {
    "tests": tests,
    "kernels": attention_kernels,
    "rivals": static_and_rivals,
    "rows": rows_of_logits,
    "law": law,
    "home": homes,
    "float8": eight_bits,
    "products": products,
    "longest": longest,
}
PARTS |= {**LAYERS, "profiles": profiles}


def machine_of(device: str, asked: str) -> Cluster:
    """One device of the preset that is asked for, else of the GPU that is there, else an H200."""
    if asked != "-":
        return cluster(asked if device == "cpu" else f"1x{asked}")
    if device == "cpu":
        return cluster("cpu")
    name = torch.cuda.get_device_name(0).lower() if device == "cuda" else ""
    return cluster("1xh100" if "h100" in name else "1xh200")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("device")
    parser.add_argument("machine")
    parser.add_argument("layers", type=int)
    parser.add_argument("deadline", type=float)
    parser.add_argument("results", type=Path)
    parser.add_argument("--methods", nargs="*", default=[], choices=METHODS)
    options = parser.parse_args()
    os.environ.update(allocator())
    until = time.monotonic() + options.deadline
    way = Way(options.device, machine_of(options.device, options.machine), options.layers, until, options.results, tuple(options.methods))
    print(json.dumps({"machine": machine(), "versions": versions()}), flush=True)
    for row in PARTS[options.part](way):
        print(json.dumps(row), flush=True)
    if options.device == "fake":
        os._exit(0)  # autograd's thread of a device that is not there may abort a process that ends


if __name__ == "__main__":
    main()
