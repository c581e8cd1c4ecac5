"""Steps of a few layers of Llama 3 8B on one device: what the ledger and the clock say of one, what the fake device counts, and what a
device measures.

FLOP are counted by three conventions: `causal`, the model's with causal scores counted once; `full`, the model's with all scores; and
`computed`, causal, with what is computed again.
"""

import contextlib
import gc
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import bare as bare
import numpy as np
import torch
from fake_device import NAME, Held

from longshift.cluster.cluster import Cluster
from longshift.dist.world import World
from longshift.documents.batch import Document, StepBatch
from longshift.layout.box import Box
from longshift.layout.home_tiers import HomeTiers
from longshift.layout.layout import Layout, Tier
from longshift.program.turns import visit_of
from longshift.schedule import chunks
from longshift.schedule.chunks import StreamOptions
from longshift.simulate.chunk_clock import ChunkClock
from longshift.simulate.clock import Clock, GroupPacks, StepTime
from longshift.simulate.cost import Cost
from longshift.simulate.habits import Habits, habits
from longshift.simulate.rates import rates
from longshift.spec.formats import PrecisionName, arithmetic, formats_of
from longshift.spec.model import ModelSpec, Rope
from longshift.spec.rule import Rule
from longshift.state.home import Home, Source
from longshift.state.optimizer import Optimizer, Schedule
from longshift.state.precision import Precision
from longshift.step.player import Player
from longshift.step.update import State, train_step
from longshift.stream import tiers
from longshift.switch.links import assumed
from longshift.switch.options import SwitchOptions
from longshift.weigh.ledger import StepEstimate
from longshift.weigh.needs import StepShape
from longshift.weigh.recorder import transport_on
from longshift.workload.groups import Edge

K = 1024
GIB = 2**30
PRECISION: PrecisionName = "bf16"
WARM_TOKENS = 8 * K  # of the step before the one that is timed
PROFILED = 4  # chunks of a step that is profiled
AGAIN_S = 5.0  # a shorter step is timed three times


def llama(layers: int, longest: int, small: bool = False) -> ModelSpec:
    """Llama 3 8B with fewer layers; `small`: something that a CPU can try."""
    if small:
        return ModelSpec("llama", 257, 128, layers, 2, 1, 64, 352, longest, rope=Rope())
    return ModelSpec("llama", 128256, 4096, layers, 32, 8, 128, 14336, longest, rope=Rope(theta=500000.0))


@dataclass(frozen=True)
class Case:
    """A step of one pack, on one rank. `lengths`: of its documents; `home`: where the training state lies; `compile`: train.compile."""

    spec: ModelSpec
    layout: Layout
    lengths: tuple[int, ...]
    home: Tier = "device"
    compile: bool = False
    precision: PrecisionName = PRECISION

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def told(self) -> dict:
        """What a row says of a case."""
        documents = {"documents": len(self.lengths)} if len(self.lengths) > 1 else {}
        home = {"home": self.home} if self.home != "device" else {}
        window = {"window": self.spec.sliding_window} if self.spec.sliding_window else {}
        precision = {"precision": self.precision} if self.precision != PRECISION else {}
        return {"layout": str(self.layout), "layers": self.spec.layers, "tokens": self.tokens, **documents, **home, **window, **precision}

    @property
    def flops(self) -> dict[str, float]:
        """FLOP of the step, by convention, but for `computed`."""
        pairs = sum(float(self.spec.attended(n)) for n in self.lengths)
        return {name: self.tokens * self.spec.flops_per_token(times * pairs / self.tokens) for name, times in (("causal", 1), ("full", 2))}

    @cached_property
    def shape(self) -> StepShape:
        formats, edges = formats_of(self.precision), (Edge(self.tokens, self.layout),)
        return StepShape.of(self.spec, edges, assumed(1), formats, 0, max(self.lengths), HomeTiers(self.home))

    def weighed(self, on_cpu: bool = False) -> StepEstimate:
        """What the ledger says."""
        packs = [self.lengths]
        ledger = self.shape.ledger(0, transport_on(not on_cpu))
        return ledger.play((visit_of(self.spec, self.layout, packs),), [packs])

    def longest(self, host_bytes: float) -> "Case":
        """The same with one document as long as this much memory of the host allows, in whole chunks."""
        chunk = self.layout.chunk

        def host(count: int) -> int:
            edge = Edge(count * chunk, self.layout)
            shape = replace(self.of(edge.upto).shape, edges=(edge,))
            peaks = shape.pack_estimate(edge, 0, "nccl").peaks
            return peaks["host"].total

        low, high = 1, 2
        while host(high) <= host_bytes:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if host(middle) <= host_bytes else (low, middle)
        return self.of(low * chunk)

    def windowed(self, window: int) -> "Case":
        """The same where a token attends to the last `window` tokens."""
        return replace(self, spec=replace(self.spec, sliding_window=window))

    def of(self, tokens: int) -> "Case":
        """The same with one document of so many tokens."""
        spec = replace(self.spec, max_positions=max(tokens, self.spec.max_positions))
        return replace(self, spec=spec, lengths=(tokens,))


def clocked(case: Case, machine: Cluster, trainer: Habits | None = None) -> StepTime:
    """The step on the clock, by the habits of another trainer where they are given."""
    trainer = trainer or habits(case.compile, case.precision, machine.device)
    cost = Cost(case.spec, rates(machine, arithmetic(case.precision)), trainer)
    return Clock(case.shape, machine, cost).step([GroupPacks(case.layout, ((case.lengths,),))])


def forecast(case: Case, machine: Cluster) -> dict:
    """The figures of a row as they are foretold: seconds by the clock, bytes and FLOP by the ledger."""
    on_cpu = machine.device.kind == "cpu"
    weighed, time = case.weighed(on_cpu), clocked(case, machine)
    found = {"seconds": time.seconds, "tokens_per_s": case.tokens / time.seconds}
    found["flops_per_s"] = {name: flops / time.seconds for name, flops in (case.flops | {"computed": weighed.flops}).items()}
    found["device_peak_gib"] = weighed.device / GIB
    found |= {f"{way}_gib": size / GIB for way, size in weighed.moved.items()}
    if (host := weighed.peaks.get("host")) is not None:
        found["host_peak_gib"] = host.total / GIB
    if (share := hidden_on_clock(case, machine)) is not None:
        found["hidden_share"] = share
    return found


def hidden_on_clock(case: Case, machine: Cluster) -> float | None:
    """The share of the seconds of a block's copies that its computing hides; None where nothing is copied."""
    if not case.layout.chunk or case.layout.offload != "host" or machine.device.kind == "cpu":
        return None
    copied_s = exposed_s = 0.0
    cost = Cost(case.spec, rates(machine, PRECISION))
    moving, still = (ChunkClock(cost, machine, case.layout, moving=moves) for moves in (True, False))
    for window in case.spec.windows:
        made = moving.lists(chunks.cut_chunks(case.lengths, case.layout.chunk), window)
        for turn in ("forward", "backward"):
            exposed_s += max(moving.turn(case.lengths, turn, window)) - max(still.turn(case.lengths, turn, window))
            ways = {"fetch": "to_device", "store": "to_host"}
            moves = [(event.kind, event.bytes) for event in made.by_turn[turn] if event.kind in ways]
            copied_s += sum(float(machine.copy_s(f"{ways[kind]} pinned both", size)) for kind, size in moves)
    return 1 - min(1.0, exposed_s / copied_s)


@dataclass(frozen=True, eq=False)
class Built:
    """A case on a device. `step`: makes one update from documents of these lengths and returns the loss."""

    step: Callable[[Sequence[int]], float]
    tier: tiers.Tier | None
    player: Player

    def close(self) -> None:
        if self.tier is not None:
            self.tier.close()


def build(case: Case, device: torch.device) -> Built:
    """`case` on a device. The learning rate is 0: all steps of all layouts have one loss, however many there are."""
    world, precision = World(0, 1, device), Precision.of(case.precision)
    real = device.type in ("cpu", "cuda")  # where it is not, nobody looks at numbers
    source = drawn_there(case.spec, device) if real else lambda _, box: torch.empty(box.shape, dtype=precision.home)
    home = Home(case.spec, case.layout, world, precision, source, HomeTiers(case.home), rule=Rule())
    state = State(case.spec, home, Optimizer(home, Rule()), Schedule(0.0, 1000), 1.0)
    edges, compiles = [Edge(case.tokens, case.layout)], case.compile and real
    player = Player(case.spec, edges, world, home, precision, SwitchOptions(), StreamOptions(), compile=compiles)

    def step(lengths: Sequence[int]) -> float:
        drawn = [np.random.default_rng(number).integers(0, case.spec.vocab, length) for number, length in enumerate(lengths)]
        documents = tuple(Document(ids, np.append(ids[1:], -100)) for ids in drawn)
        return train_step(state, StepBatch(documents, sum(lengths) - len(lengths), 0, 1), player).loss

    return Built(step, player.runners[case.layout].tier, player)


def drawn_there(spec: ModelSpec, device: torch.device) -> Source:
    """Initial weights, drawn on the device: the run's own source takes a minute for billions of them."""
    make = torch.Generator(device).manual_seed(0)

    def source(name: str, box: Box) -> torch.Tensor:
        init = spec.by_name[name].init
        if init in ("zeros", "ones"):
            return torch.full(box.shape, float(init == "ones"), device=device)
        return torch.randn(box.shape, generator=make, device=device).mul_(spec.init_std)

    return source


def warm(case: Case) -> tuple[int, ...]:
    """Documents of a step before the one that counts: of two chunks, or a few."""
    most = min(case.tokens, 2 * case.layout.chunk or WARM_TOKENS)
    found = [length for length, end in zip(case.lengths, np.cumsum(case.lengths)) if end <= most]
    return tuple(found) or (most,)


def count(case: Case, device: torch.device, held: Held) -> dict:
    """What the fake device holds at the most and between steps, and what its operations do."""
    gc.collect()  # a player and its table refer to each other
    built = build(case, device)
    built.step(warm(case))
    between = held.now[NAME]
    held.restart()
    built.step(case.lengths)
    found = {"device_peak_gib": held.most[NAME] / GIB, "device_between_gib": between / GIB, **held.work, **moved(built.tier)}
    built.close()
    return found


def measure(case: Case, device: torch.device, trace: Path | None = None, profile: bool = True) -> dict:
    """What a step takes, of three if it is short the fastest; `fault` where it does not fit. `trace`: a file for the profiler's trace of a
    step of at most PROFILED chunks, which tells what share of its copies is hidden; `profile`: whether there is time for that."""
    try:
        found = _measured(case, device, trace, profile)
    except torch.cuda.OutOfMemoryError as fault:
        found = {"fault": str(fault).splitlines()[0]}
    gc.collect()  # a player and its table refer to each other
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _measured(case: Case, device: torch.device, trace: Path | None, profile: bool) -> dict:
    with contextlib.closing(build(case, device)) as built:
        built.step(warm(case))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds, loss = math.inf, math.nan
        for _ in range(3):
            wait(device)
            began = time.perf_counter()
            loss = built.step(case.lengths)
            wait(device)
            seconds = min(seconds, time.perf_counter() - began)
            if seconds > AGAIN_S:
                break
        found: dict = {"seconds": seconds, "tokens_per_s": case.tokens / seconds, "loss": loss}
        found["flops_per_s"] = {name: flops / seconds for name, flops in case.flops.items()}
        if device.type == "cuda":
            found["device_peak_gib"] = torch.cuda.max_memory_allocated(device) / GIB
            found["reserved_peak_gib"] = torch.cuda.max_memory_reserved(device) / GIB
        found["host_resident_gib"] = resident() / GIB  # arenas stay pinned till the tier is closed
        found |= {**moved(built.tier), "kernel": f"{built.player.kernel.name}: {built.player.why_kernel}"}
        if profile and (built.tier is not None or trace is not None):
            few = few_chunks(case)
            with tempfile.TemporaryDirectory() as folder:
                found["hidden_share"] = hidden(profiled(lambda: built.step(few), device, trace or Path(folder) / "trace.json"))
            found |= {"trace": str(trace)} if trace is not None else {}
        return found


def few_chunks(case: Case) -> tuple[int, ...]:
    """Documents of a step whose profile can be read."""
    most = PROFILED * case.layout.chunk
    return (most,) if 0 < most < case.tokens else case.lengths


def profiled(step: Callable[[], object], device: torch.device, path: Path) -> dict:
    """The profiler's trace of a step, which is also left at `path`."""
    with torch.profiler.profile() as profile:
        step()
        wait(device)
    profile.export_chrome_trace(str(path))
    return json.loads(path.read_text())


def hidden(trace: dict) -> float | None:
    """The share of the time of copies between host and device that lies under kernels; None without copies."""
    spans: dict[str, list[tuple[float, float]]] = {"kernel": [], "gpu_memcpy": []}
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel" or (event.get("cat") == "gpu_memcpy" and ("HtoD" in event["name"] or "DtoH" in event["name"])):
            spans[event["cat"]].append((event["ts"], event["ts"] + event["dur"]))
    copies, kernels, either = map(_covered, (spans["gpu_memcpy"], spans["kernel"], spans["gpu_memcpy"] + spans["kernel"]))
    return (copies + kernels - either) / copies if copies else None


def _covered(spans: list[tuple[float, float]]) -> float:
    """Time that lies in at least one."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def peak_flops(device: torch.device, size: int) -> float:
    """FLOP/s of a bf16 matmul."""
    x = torch.randn(size, size, device=device).bfloat16()
    best = float("inf")
    for _ in range(10):
        wait(device)
        began = time.perf_counter()
        x @ x
        wait(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def moved(tier: tiers.Tier | None) -> dict:
    """In the last step, and the most that the tier held."""
    if tier is None:
        return {}
    found = {"tier_peak": tier.moved.peak_bytes, "put": tier.moved.put_bytes, "fetched": tier.moved.fetched_bytes}
    return {f"{name}_gib": size / GIB for name, size in found.items()}
