"""What a command reaches: files that it reads, addresses that it binds, classes that it unpickles.

An audit hook in every Python process sees what Python does (`audited/sitecustomize.py`). Native libraries open files and sockets by
themselves; `strace`, where there is one, sees those too.
"""

import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import longshift

SYSTEM = ("/proc", "/sys", "/dev", "/etc", "/lib", "/lib64", "/usr", "/run/systemd")
OPENED = re.compile(r'^\d+ +open(?:at)?\((?:[A-Z_]+|\d+)?(?:<(.*?)>)?(?:, )?"(.*?)", ([A-Z_|0-9x]+).*(?:\) = \d+|<unfinished)')
BOUND = re.compile(r"^\d+ +bind\(.*?sa_family=(AF_INET6?),.*?(?:inet_addr\(|inet_pton\(AF_INET6, )\"(.*?)\"")


@dataclass
class Reached:
    """Mutable: filled process by process. `unpickled`: classes with the file of the code that asked for them."""

    read: set[str] = field(default_factory=set)
    bound: set[str] = field(default_factory=set)
    unpickled: set[tuple[str, ...]] = field(default_factory=set)

    def wrong(self, folders: Iterable[Path]) -> list[str]:
        """What should not have been reached by a command to which these folders were named."""
        own = [sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values(), Path(longshift.__file__).parent]
        named = [Path(folder).resolve() for folder in (*SYSTEM, *own, Path(__file__).parent / "audited", *folders)]
        searched = {Path(place).resolve() for place in sys.path}  # for modules: Python lists these folders
        found = {path: Path(path).resolve() for path in sorted(self.read)}
        outside = [path for path, real in found.items() if real not in searched and not any(map(real.is_relative_to, named))]
        open_to_others = [address for address in sorted(self.bound) if not ipaddress.ip_address(address).is_loopback]
        pickles = [" ".join(words) for words in sorted(self.unpickled)]
        return [*(f"read {p}" for p in outside), *(f"bound {a}" for a in open_to_others), *(f"unpickled {p}" for p in pickles)]


def reached(command: Sequence[str], place: Path) -> Reached:
    """What `python COMMAND` reaches, run in `place`/cwd, with `place`/tmp for temporary files and `place`/home for the user's."""
    audit, trace = place / "audit", place / "trace"
    for folder in ("cwd", "tmp", "home"):
        (place / folder).mkdir(exist_ok=True)
    path = os.pathsep.join([str(Path(__file__).with_name("audited")), str(Path(longshift.__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": path, "FAULTS_AUDIT": str(audit), "TMPDIR": str(place / "tmp"), "HOME": str(place / "home")}
    traced = ["strace", "-f", "-y", "--seccomp-bpf", "-s", "4096", "-e", "trace=open,openat,bind", "-o", str(trace)] if strace() else []
    done = subprocess.run(
        [*traced, sys.executable, "-P", *command], cwd=place / "cwd", env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = Reached()
    for line in audit.read_text().splitlines():
        event, *what = json.loads(line)
        if event == "open" and what[1] & os.O_ACCMODE in (os.O_RDONLY, os.O_RDWR):
            found.read.add(what[0])
        elif event == "socket.bind" and len(what) > 1:
            found.bound.add(what[0] or "0.0.0.0")
        elif event == "pickle.find_class":
            found.unpickled.add(tuple(what))
    for line in trace.read_text(errors="replace").splitlines() if strace() else ():
        if (match := OPENED.match(line)) and "O_WRONLY" not in match[3]:
            found.read.add(os.path.join(match[1] or place / "cwd", match[2]))
        elif match := BOUND.match(line):
            found.bound.add(match[2])
    audit.unlink()
    return found


def strace() -> bool:
    """Whether `strace` may follow a process here."""
    return (
        bool(shutil.which("strace"))
        and subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, check=False).returncode == 0
    )
