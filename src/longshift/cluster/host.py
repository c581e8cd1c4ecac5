"""What this machine's processor is. Reads no more than the operating system tells."""

import os
import platform
import sys
from pathlib import Path

CACHE = Path("~/.cache/longshift")


def host_facts(cores: int | None = None) -> dict[str, str | int | float]:
    """Those of a profile's facts that need no torch. `cores`: that this process might use when it
    began, where it may use fewer now."""
    return {
        "cpu": cpu_name(),
        "cores": core_count() if cores is None else cores,
        "core_quota": core_quota() or "none",
        "system": f"{platform.system()} {platform.machine()}",
    }


def has_gpu() -> bool:
    """Whether this machine shows an NVIDIA GPU's driver."""
    return Path("/proc/driver/nvidia/version").exists()


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


def core_count() -> int:
    """Cores that this process may use."""
    # macOS and Windows do not tell which these are.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def core_quota() -> float | None:
    """Cores' worth of time that the process's control group allows it; None where there is no limit
    or no such thing."""
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        # A line without controllers is of cgroup v2; lines of v1 name theirs.
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
