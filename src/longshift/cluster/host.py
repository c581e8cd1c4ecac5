"""What this machine's processor is, and which profile was measured on it. Reads no more than the
operating system tells."""

import os
import platform
import sys
from pathlib import Path

from longshift.cluster.cluster import Cluster
from longshift.cluster.files import load
from longshift.errors import UsageError

CACHE = Path("~/.cache/longshift")


def host_facts() -> dict[str, str | int | float]:
    """Those of a profile's facts that need no torch."""
    return {
        "cpu": cpu_name(),
        "cores": core_count(),
        "core_quota": core_quota() or "none",
        "system": f"{platform.system()} {platform.machine()}",
    }


def profile_of_host(
    per_node: int,
    nodes: int = 1,
    kind: str | None = None,
    cache: Path = CACHE,
) -> Cluster | None:
    """The profile of this machine that serves best for `nodes` of it with `per_node` ranks each;
    None where it was not measured.

    `kind`: of device, cpu or cuda; a GPU's before a CPU's where None. Software and numbers of
    threads may differ from those of now: this is for what they hardly change, such as
    links. Files that are damaged are passed over.
    """
    facts = host_facts()
    best_profile = None
    best_rank: tuple = ()
    for file in sorted((cache.expanduser() / "profiles").glob("*.json")):
        try:
            profile = load(file)
        except UsageError:
            continue
        is_here = all(profile.facts.get(name) == value for name, value in facts.items())
        if not is_here or kind not in (None, profile.device.kind):
            continue
        # The name makes the choice the same whatever the order of the files.
        rank = (
            profile.device.kind == "cuda",
            profile.nodes == nodes,
            profile.devices_per_node == per_node,
            profile.facts.get("measured") == "full",
            file.name,
        )
        if rank > best_rank:
            best_profile = profile
            best_rank = rank
    return best_profile


def has_gpu() -> bool:
    """Whether this machine shows an NVIDIA GPU's driver."""
    return Path("/proc/driver/nvidia/version").exists()


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [
            line.split(":", 1)[1].strip()
            for line in info.read_text().splitlines()
            if "model name" in line
        ]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def core_quota() -> float | None:
    """Cores' worth of time that the process's control group allows it; None where there is no limit
    or no such thing."""
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        for _, controllers, path in groups:
            if controllers == "":
                folder = Path("/sys/fs/cgroup") / path.strip("/")
                quota, period = (folder / "cpu.max").read_text().split()
            elif "cpu" in controllers.split(","):
                folder = Path("/sys/fs/cgroup/cpu") / path.strip("/")
                quota = (folder / "cpu.cfs_quota_us").read_text().strip()
                period = (folder / "cpu.cfs_period_us").read_text().strip()
            else:
                continue
            if quota not in ("max", "-1"):
                return int(quota) / int(period)
    except (OSError, ValueError):
        return None
    return None


def forks_ranks() -> bool:
    """Whether ranks may be forked here: on Linux, where there is no driver of NVIDIA's GPUs or
    AMD's. A process that has used a GPU cannot be forked, and only torch can tell whether this one
    sees any."""
    return sys.platform == "linux" and not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd")))
