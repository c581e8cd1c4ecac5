"""Facts about this machine that measurements depend on; together they are its fingerprint. Nothing names the machine or its user."""

import os
import platform
import re
from pathlib import Path

import psutil
import torch


def facts(device: torch.device, nodes: int, devices_per_node: int, quick: bool) -> dict[str, str | int | float]:
    """Hardware, driver, torch and a CPU's threads, and how much was measured."""
    found: dict[str, str | int | float] = {
        "measured": "quick" if quick else "full",
        "device": device_name(device),
        "cpu": cpu_name(),
        "cores": core_count(),
        "core_quota": core_quota() or "none",
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "nodes": nodes,
        "devices_per_node": devices_per_node,
    }
    if device.type == "cpu":
        found["threads"] = torch.get_num_threads()
    else:
        found |= {"driver": driver(), "cuda": torch.version.cuda or "none", "cudnn": str(torch.backends.cudnn.version())}
    return found


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def core_quota() -> float | None:
    """Cores' worth of time that the process's control group allows it; None where there is no limit or no such thing."""
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        for _, controllers, path in groups:
            if controllers == "":
                quota, period = (Path("/sys/fs/cgroup") / path.strip("/") / "cpu.max").read_text().split()
            elif "cpu" in controllers.split(","):
                at = Path("/sys/fs/cgroup/cpu") / path.strip("/")
                quota, period = ((at / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
            else:
                continue
            if quota not in ("max", "-1"):
                return int(quota) / int(period)
    except (OSError, ValueError):
        return None
    return None


def driver() -> str:
    """Version of the GPU's driver."""
    version = Path("/proc/driver/nvidia/version")
    words = re.findall(r"\d+\.\d+[.\d]*", version.read_text()) if version.exists() else []
    return words[0] if words else "unknown"
