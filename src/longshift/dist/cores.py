"""Cores beside a rank's GPU, on machines whose memory is in several nodes (NUMA).

The rank's threads update a home in host memory, and its bytes are copied to and from the GPU. Where
the threads run in another node than the GPU's, these bytes cross between the nodes. Linux puts
memory into the node of the thread that first writes it. So threads that stay beside the GPU have
their memory there, too. No machine with several nodes has run this.
"""

import os
from contextlib import suppress
from pathlib import Path

import torch

MACHINE = Path("/sys")


def stay_near(device: torch.device, machine: Path = MACHINE) -> set[int]:
    """Keep this thread, and those that it starts from now on, on the cores of its GPU's memory
    node, as far as it may use them. The cores; none, and nothing is changed, where the machine has
    one node, does not say, or gives none of them."""
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return set()
    # As Linux names the device in /sys; a GPU is function 0 of its own.
    facts = torch.cuda.get_device_properties(device)
    place = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    near = cores_beside(place, machine) & os.sched_getaffinity(0)
    if near:
        os.sched_setaffinity(0, near)
    return near


def cores_beside(place: str, machine: Path = MACHINE) -> set[int]:
    """The cores of the memory node that a PCI device is attached to; none where there is one node,
    or it is not known."""
    nodes = machine / "devices" / "system" / "node"
    if len(list(nodes.glob("node[0-9]*"))) < 2:
        return set()
    with suppress(OSError, ValueError):
        number = int((machine / "bus" / "pci" / "devices" / place / "numa_node").read_text())
        # A number of -1 has no folder.
        return parsed((nodes / f"node{number}" / "cpulist").read_text())
    return set()


def parsed(listed: str) -> set[int]:
    """Numbers of a list of the kernel's, such as 0-15,32-47. Raises ValueError."""
    cores: set[int] = set()
    for part in listed.strip().split(","):
        # A node without cores has an empty list.
        if part:
            first, _, last = part.partition("-")
            cores |= set(range(int(first), int(last or first) + 1))
    return cores
