"""Does a run that is let in survive, and is one refused that would not? `ledger_caps.py N` trains N random layouts twice on this machine,
each rank in a control group of its own, and prints what happened.

    roomy    limit = 1.10 of what admission says: bytes of the process and of its tensors; the run ends with exit code 0
    tight    limit = 0.95 of it: every rank is refused with exit code 7 before the first step

The limit is set in the rank right before admission, when it is known what the process has by then. `has`: bytes of the process then,
as admission counts them; `counted`: as its control group does; `peak`: the most that a control group of the run has counted. Needs root and
control groups, v1 or v2; says so where it has none.
"""

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from common import publish

from longshift.layout.layout import Layout
from longshift.layout.legal import faults
from longshift.spec.families import preset
from longshift.step_report import shape_of
from longshift.weigh.needs import largest_need, memory_needs

ROOMY, TIGHT = 1.10, 0.95
TOKENS = 8192  # of a pack
GROUPS = Path("/sys/fs/cgroup")
DEADLINE_S = 300.0
REFUSED = 7  # exit code
CONFIG = """
model: {{preset: tiny-llama}}
data: {{train: [{{corpus: python}}], max_len: {tokens}, overlong: split}}
train: {{tokens_per_step: {step}, steps: 2, lr: 1e-3, precision: {precision}}}
layout: {layout}
save: {{dir: {folder}}}
"""


def layouts(count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Random legal layouts of at most 4 ranks, and precisions."""
    draw, known = random.Random(seed), set[str]()
    while len(known) < count:
        parallel = draw.choice(("dp1", "dp2", "tp2", "u2", "ring2", "pp2", "dp2.tp2", "pp2.dp2", "pp2.v2", "u2.tp2"))
        zero = draw.choice(("", ".z1", ".z2", ".z3"))
        rest = draw.choice(("", ".recompute-selective", ".recompute-full", ".recompute-full.disk", ".chunk1K", ".chunk1K.disk.kv-offload"))
        text = parallel + zero + rest
        if text not in known and not _faults(text):
            known.add(text)
            yield text, draw.choice(("float32", "float32", "bf16"))


def _faults(text: str) -> bool:
    try:
        layout = Layout.parse(text)
    except Exception:
        return True
    return bool(faults(preset("tiny-llama"), layout, layout.world, TOKENS))


class Group:
    """A control group of memory for one process, of either version. Mutable."""

    def __init__(self, name: str):
        self.first = not (GROUPS / "cgroup.controllers").exists()
        self.folder = (GROUPS / "memory" if self.first else GROUPS) / name
        if not self.first:
            (GROUPS / "cgroup.subtree_control").write_text("+memory")
        self.folder.mkdir()

    def enter(self) -> None:
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def close(self) -> None:
        self.folder.rmdir()


def file_of(folder: Path, first: str, second: str) -> Path:
    """A file of a control group, by its name in version 1 or 2."""
    return folder / first if (folder / first).exists() else folder / second


def used(folder: Path, most: bool = False) -> int:
    """Bytes that a control group counts, page cache included; at the most."""
    names = ("memory.max_usage_in_bytes", "memory.peak") if most else ("memory.usage_in_bytes", "memory.current")
    return int(file_of(folder, *names).read_text())


@contextmanager
def groups(count: int) -> Iterator[list[Group]]:
    with ExitStack() as stack:
        found = []
        for rank in range(count):
            found.append(Group(f"longshift-caps-{os.getpid()}-{rank}"))
            stack.callback(found[-1].close)
        yield found


def rank(config: str, folder: str, factor: float) -> None:
    """One rank of the run, a process of its own, which sets its limit before admission."""
    import psutil

    from longshift import cli
    from longshift.trainer import admission, loop

    def admit(run, world, path) -> admission.Admitted:
        admission.settle(world.device)
        need = largest_need(memory_needs(shape_of(run, world.per_node), run.edges, "gloo")).of("device")
        has = psutil.Process().memory_info().rss
        file_of(Path(folder), "memory.limit_in_bytes", "memory.max").write_text(str(int(factor * (has + need))))
        print(json.dumps({"need": need, "has": has, "counted": used(Path(folder))}), flush=True)
        return admission.admit(run, world, path)

    loop.admit = admit
    sys.argv = ["longshift", "train", config]
    cli.main()


def played(text: str, precision: str, factor: float) -> dict:
    """What became of the run of a layout."""
    world = Layout.parse(text).world
    with tempfile.TemporaryDirectory() as folder, groups(world) as places, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        config = Path(folder) / "run.yaml"
        step = 2 * TOKENS * Layout.parse(text).dp
        config.write_text(CONFIG.format(tokens=TOKENS, step=step, precision=precision, layout=text, folder=f"{folder}/run"))
        there = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        there |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        processes = []
        for number, place in enumerate(places):
            own = (there | {"RANK": str(number), "LOCAL_RANK": str(number)}) if world > 1 else {"OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-W", "ignore", __file__, "--rank", str(config), str(place.folder), str(factor)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            processes.append(subprocess.Popen(command, env=os.environ | own, preexec_fn=place.enter, **pipes))
        told = []
        try:
            told = [process.communicate(timeout=DEADLINE_S) for process in processes]
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        peak = max(used(place.folder, most=True) for place in places)
        codes = [process.returncode for process in processes]
        steps = [path.read_text().count('"step"') for path in (Path(folder) / "run").glob("metrics*.jsonl")]
    said = next((json.loads(line) for out, _ in told for line in out.splitlines() if line.startswith('{"need"')), {})
    found = {"layout": text, "precision": precision, "factor": factor, "codes": codes, "steps": max(steps, default=0), "peak": peak, **said}
    good = codes == [0] * world if factor > 1 else all(code == REFUSED for code in codes) and not found["steps"]
    return found | {"as_expected": good} | ({} if good else {"said": [error[-600:] for _, error in told]})


def main() -> None:
    if sys.argv[1] == "--rank":
        rank(sys.argv[2], sys.argv[3], float(sys.argv[4]))
        return
    try:
        with groups(1):
            pass
    except OSError as fault:
        publish("ledger_caps", {"cap_layouts": 0, "control_groups": str(fault)}, [], as_json=True)
        return
    rows = []
    for case in layouts(int(sys.argv[1])):
        for factor in (ROOMY, TIGHT):
            rows.append(played(*case, factor))
            print(rows[-1], file=sys.stderr, flush=True)
    survived, refused = (sum(row["as_expected"] for row in rows if row["factor"] == factor) for factor in (ROOMY, TIGHT))
    publish("ledger_caps", {"cap_layouts": len(rows) // 2, "cap_survived": survived, "cap_refused": refused}, rows, as_json=True)


if __name__ == "__main__":
    main()
