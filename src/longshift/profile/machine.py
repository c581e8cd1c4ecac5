"""Facts about this machine that measurements depend on; together they are its fingerprint. Nothing
names the machine or its user."""

import re
from pathlib import Path

import psutil
import torch

from longshift.cluster.host import cpu_name, host_facts


def facts(
    device: torch.device, nodes: int, devices_per_node: int, quick: bool
) -> dict[str, str | int | float]:
    """Hardware, driver, torch and a CPU's threads, and how much was measured."""
    values = host_facts() | {
        "measured": "quick" if quick else "full",
        "device": device_name(device),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "torch": torch.__version__,
        "nodes": nodes,
        "devices_per_node": devices_per_node,
    }
    if device.type == "cpu":
        values["threads"] = torch.get_num_threads()
    else:
        values["driver"] = driver()
        values["cuda"] = torch.version.cuda or "none"
        values["cudnn"] = str(torch.backends.cudnn.version())
    return values


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def driver() -> str:
    """Version of the GPU's driver."""
    version = Path("/proc/driver/nvidia/version")
    words = re.findall(r"\d+\.\d+[.\d]*", version.read_text()) if version.exists() else []
    return words[0] if words else "unknown"
