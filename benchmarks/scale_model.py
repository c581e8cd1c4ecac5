"""A scale model of a cluster of GPUs on one Linux machine: real processes, real gloo, shaped links, capped devices.

Each rank runs in a network namespace of its own, all on one bridge, with
- its links shaped by destination: --intra to ranks of its node, --inter to others (bytes per second; K, M, G are decimal),
- its compute capped (--cpu, in cores; a quota of 10 ms periods, so that an idle rank's time is not given to another),
- its memory capped (--memory; K, M, G are binary): a rank that needs more is killed, as a device would run out of memory.

Similarity: a transformer R times narrower than the one it stands for spends R times fewer FLOP per byte on the wire. With width/R,
sequence lengths/R and memory/R^2, links must be R times faster relative to compute; then the shares of attention, linear layers, tensor,
sequence and data parallel traffic, and memory, are those of the real run. `--like a800 --shrink R` derives --intra and --inter so, from
the cores of a rank and the rate of a bf16 layer measured here, or given with --rate. Latency does not shrink: keep a layer's time per
rank well above 10 ms (fewer, wider layers). A ratio measured on the model is a measurement of real code, not a simulation.

    sudo .venv/bin/python benchmarks/scale_model.py --nodes 2 --per-node 2 --cpu 0.5 --memory 2G --like a800 --shrink 6.5 -- \\
        .venv/bin/longshift train config.yaml         # width 1024, 0.6K-5K tokens: stands for width 6656, 4K-32K on A800 nodes

The command finds torchrun's variables and GLOO_SOCKET_IFNAME in its environment. Output of rank 0 is shown, the others' goes to --logs.
The exit status is the worst of the ranks'. Needs root, iproute2 (ip, tc) and cgroups, v1 or v2; without the latter it says so and runs
uncapped. Standard library only.
"""

import argparse
import json
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass

REAL = {  # FLOP/s that bf16 linear layers reach in training; NVLink and NIC bytes/s, one way, per device
    "a800": (200e12, 200e9, 25e9),
    "a100": (200e12, 300e9, 25e9),
    "h100": (500e12, 450e9, 50e9),
    "h200": (520e12, 450e9, 50e9),
}
CGROUPS = pathlib.Path("/sys/fs/cgroup")
PERIOD_US = 10_000
WEIGHT = 20  # of a rank against other work on the machine
UNSHAPED_BYTES_PER_S = 1.25e9
BURST_S = 0.002  # of a link's rate; less and the shaper's own timer limits it
PORT = 29500

RATE = """
import time, torch
torch.set_num_threads(1)
T, D, F = 1024, 1024, 2816
x = torch.randn(T, D).bfloat16().requires_grad_()
up, gate, down = (torch.randn(*shape).bfloat16().mul_(0.02).requires_grad_() for shape in ((D, F), (D, F), (F, D)))
def step():
    ((torch.nn.functional.silu(x @ up) * (x @ gate)) @ down).sum().backward()
warm = time.time()
while time.time() - warm < 3:
    step()
used, steps = time.process_time(), 0
while time.process_time() - used < 2:
    step()
    steps += 1
print(steps * 18 * T * D * F / (time.process_time() - used))
"""


@dataclass(frozen=True)
class Model:
    """`cpu`: cores a rank. 0 leaves a limit out."""

    nodes: int
    per_node: int
    cpu: float
    memory_bytes: int
    intra_bytes_per_s: float
    inter_bytes_per_s: float

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


def run(model: Model, command: Sequence[str], logs: pathlib.Path, timeout_s: float) -> dict:
    """Run `command` once a rank. Returns exit codes (None: still running at the timeout), peak bytes, and who was killed for memory."""
    name, started = secrets.token_hex(2), time.monotonic()
    where = addresses(model, name)
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        spaces = stack.enter_context(network(model, name, where))
        caps = [stack.enter_context(capped(space, model.cpu, model.memory_bytes)) for space in spaces]
        processes: list[subprocess.Popen] = []
        stack.callback(_end, processes)
        for rank, space in enumerate(spaces):
            output = None if rank == 0 else stack.enter_context((logs / f"rank{rank}.log").open("w"))
            processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", space, *command],
                    env=os.environ | _environment(model, rank, where[0]),
                    stdout=output,
                    stderr=subprocess.STDOUT if output else None,
                    start_new_session=True,
                    preexec_fn=caps[rank].enter,
                )
            )
        while any(process.poll() is None for process in processes) and time.monotonic() - started < timeout_s:
            time.sleep(0.05)
        codes = [process.poll() for process in processes]
        peaks = [cap.peak_bytes() for cap in caps]
    killed = [rank for rank, code in enumerate(codes) if code == -signal.SIGKILL]
    seconds = time.monotonic() - started
    return {**asdict(model), "seconds": seconds, "exit_codes": codes, "killed_for_memory": killed, "peak_bytes": peaks}


def addresses(model: Model, name: str) -> list[str]:
    """Of the ranks."""
    return [f"10.77.{int(name[:2], 16)}.{rank + 1}" for rank in range(model.ranks)]


@contextmanager
def network(model: Model, name: str, places: Sequence[str]) -> Iterator[list[str]]:
    """A namespace for each rank, on one bridge, its way out shaped; all taken down after. Yields the namespaces' names."""
    bridge, spaces = f"lsb{name}", [f"ls{name}-{rank}" for rank in range(model.ranks)]
    try:
        _sh("ip", "link", "add", bridge, "type", "bridge")
        _sh("ip", "link", "set", bridge, "up")
        for rank, space in enumerate(spaces):
            outside = f"v{name}{rank}"
            _sh("ip", "netns", "add", space)
            _sh("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
            _sh("ip", "link", "set", outside, "master", bridge, "up")
            _in(space, "ip link set lo up")
            _in(space, f"ip addr add {places[rank]}/24 dev eth0")
            _in(space, "ip link set eth0 up")
            if model.intra_bytes_per_s or model.inter_bytes_per_s:
                _shape(model, rank, space, places)
        yield spaces
    finally:
        for space in spaces:
            _sh("ip", "netns", "del", space, check=False)
        _sh("ip", "link", "del", bridge, check=False)


def _shape(model: Model, rank: int, space: str, places: Sequence[str]) -> None:
    """Classes of one rank's way out: 10 to its node, 20 to other nodes, 30 to anything else."""
    _in(space, "tc qdisc add dev eth0 root handle 1: htb default 30 r2q 1000")
    for number, asked in ((10, model.intra_bytes_per_s), (20, model.inter_bytes_per_s), (30, 0)):
        rate = asked or UNSHAPED_BYTES_PER_S
        burst = max(16384, int(rate * BURST_S))
        limits = f"rate {int(rate * 8)}bit burst {burst} cburst {burst} quantum 60000"
        _in(space, f"tc class add dev eth0 parent 1: classid 1:{number} htb {limits}")
    for other, address in enumerate(places):
        if other != rank:
            number = 10 if other // model.per_node == rank // model.per_node else 20
            match = f"u32 match ip dst {address}/32 flowid 1:{number}"
            _in(space, f"tc filter add dev eth0 protocol ip parent 1: prio 1 {match}")


class Caps:
    """Control groups of one rank, and the file in which its peak memory stands."""

    def __init__(self, folders: Sequence[pathlib.Path], peak: pathlib.Path | None):
        self.folders, self.peak = folders, peak

    def enter(self) -> None:
        """Called in the rank's process, before its command."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

    def peak_bytes(self) -> int | None:
        try:
            return int(self.peak.read_text()) if self.peak else None
        except (OSError, ValueError):
            return None


@contextmanager
def capped(name: str, cpu: float, memory_bytes: int) -> Iterator[Caps]:
    """Control groups of that name, v1 or v2; none, and a word about it, where they cannot be made."""
    quota, made = int(cpu * PERIOD_US), []

    def make(folder: pathlib.Path, limits: Mapping[str, object]) -> pathlib.Path:
        folder.mkdir()
        made.append(folder)
        for file, value in limits.items():
            (folder / file).write_text(str(value))
        return folder

    try:
        if (CGROUPS / "cgroup.controllers").exists():
            (CGROUPS / "cgroup.subtree_control").write_text("+cpu +memory")
            limits = {"cpu.max": f"{quota} {PERIOD_US}", "cpu.weight": 100 * WEIGHT} if cpu else {}
            limits |= {"memory.max": memory_bytes, "memory.swap.max": 0} if memory_bytes else {}
            peak = make(CGROUPS / name, limits) / "memory.peak"
        else:
            if cpu:
                make(CGROUPS / "cpu" / name, {"cpu.cfs_period_us": PERIOD_US, "cpu.cfs_quota_us": quota, "cpu.shares": 1024 * WEIGHT})
            limits = {"memory.limit_in_bytes": memory_bytes} if memory_bytes else {}
            peak = make(CGROUPS / "memory" / name, limits) / "memory.max_usage_in_bytes"
        caps = Caps(made, peak)
    except OSError as fault:
        say(f"no control groups here ({fault}); running uncapped")
        caps = Caps((), None)
    try:
        yield caps
    finally:
        for folder in made:
            for _ in range(50):  # a group is busy until its last process is gone
                with suppress(OSError):
                    folder.rmdir()
                    break
                time.sleep(0.1)


def _environment(model: Model, rank: int, master: str) -> dict[str, str]:
    node, local = divmod(rank, model.per_node)
    place = {"RANK": rank, "WORLD_SIZE": model.ranks, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": model.per_node, "GROUP_RANK": node}
    where = {"MASTER_ADDR": master, "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    return {name: str(value) for name, value in place.items()} | where


def _end(processes: Sequence[subprocess.Popen]) -> None:
    """Processes that still run, with all that they started."""
    for process in processes:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does, so that what was set up is taken down."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _in(space: str, words: str) -> None:
    _sh("ip", "netns", "exec", space, *words.split())


def _sh(*words: str, check: bool = True) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if check and done.returncode:
        raise SystemExit(f"scale_model: {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def say(line: str) -> None:
    print(f"scale_model: {line}", file=sys.stderr, flush=True)


def decimal(text: str) -> float:
    return _number(text, {"K": 1e3, "M": 1e6, "G": 1e9})


def binary(text: str) -> int:
    return int(_number(text, {"K": 2**10, "M": 2**20, "G": 2**30}))


def _number(text: str, units: Mapping[str, float]) -> float:
    unit = units.get(text[-1:].upper())
    return float(text[:-1]) * unit if unit else float(text)


def arguments() -> argparse.ArgumentParser:
    """All that describes a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--per-node", type=int, default=2)
    parser.add_argument("--cpu", type=float, default=0, help="cores a rank; 0: no limit")
    parser.add_argument("--memory", type=binary, default=0, help="bytes a rank; 0: no limit")
    parser.add_argument("--intra", type=decimal, default=0, help="bytes/s to ranks of the same node; 0: not shaped")
    parser.add_argument("--inter", type=decimal, default=0, help="bytes/s to ranks of other nodes; 0: not shaped")
    parser.add_argument("--like", choices=REAL, help="derive --intra and --inter from this device")
    parser.add_argument("--shrink", type=float, default=1, help="real width / width here")
    parser.add_argument("--rate", type=decimal, default=0, help="FLOP/s that a core reaches on linear layers; measured if left out")
    return parser


def model(options: argparse.Namespace, python: str) -> Model:
    """What is asked for; `--like` measures, with that interpreter, what `--rate` does not give."""
    intra, inter = options.intra, options.inter
    if options.like:
        flops, nvlink, nic = REAL[options.like]
        rate = options.rate or float(_sh(python, "-c", RATE))
        scale = options.shrink * rate * (options.cpu or 1) / flops
        intra, inter = intra or nvlink * scale, inter or nic * scale
        say(f"{rate / 1e9:.0f} GFLOP/s a core; {options.like} shrunk {options.shrink:g}x: {intra / 1e6:.1f} and {inter / 1e6:.2f} MB/s")
    return Model(options.nodes, options.per_node, options.cpu, options.memory, intra, inter)


def main() -> int:
    parser = arguments()
    parser.add_argument("--timeout", type=float, default=3600, help="seconds")
    parser.add_argument("--logs", type=pathlib.Path, help="folder for the ranks' outputs")
    parser.add_argument("--json", type=pathlib.Path, help="file for the summary")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    options.command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not options.command:
        parser.error("a command is needed after --")
    if os.geteuid():
        parser.error("needs root, for network namespaces")
    first = pathlib.Path(options.command[0])
    asked = model(options, str(first if "python" in first.name else first.with_name("python")))
    logs = options.logs or pathlib.Path(f"scale-model-{secrets.token_hex(2)}")
    summary = run(asked, options.command, logs, options.timeout) | {"like": options.like, "shrink": options.shrink}
    if options.json:
        options.json.write_text(json.dumps(summary, indent=1))
    say(json.dumps(summary))
    codes = summary["exit_codes"]
    return 124 if None in codes else max(code if code >= 0 else 128 - code for code in codes)


if __name__ == "__main__":
    sys.exit(main())
