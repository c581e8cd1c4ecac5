"""A tokenizer tried in a process of its own, with a deadline: its library panics, aborts or never
returns for some files, and takes the process with it. The child imports next to nothing of
Longshift, and ends with the process that asked. It may compute for so long, however busy the
machine is; one that waits for something is ended after WAITS times as long.
"""

import os
import signal
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import tokenizers

from longshift.dist.launcher import end_with_parent

DEADLINE_S = 120.0  # of a processor: the largest tokenizers take some seconds to open
WAITS = 20
# What later texts are made of: words, numbers, spaces, signs, other scripts, one long run of each
# kind.
PROBES = (
    "",
    "Hello, world! It's 3.14 at 12:30.\n\n\tif x == 1:\r\n",
    "ä ß 日本語 한국어 עברית 🙂\U000e0001",
    "a" * 3000 + "!",
    " " * 3000 + ".",
)
PROBES += ("1" * 3000 + "x", "aB1 " * 1000, "<|endoftext|><s></s>[UNK]\x01\x7f")


def why_not(file: Path, deadline_s: float = DEADLINE_S) -> str | None:
    """Why the tokenizer of a file cannot be used; None where it can. A file that has not changed is
    tried once by a process."""
    return _try_in_child(file, file.stat().st_mtime_ns, file.stat().st_size, deadline_s)


@lru_cache(maxsize=64)
def _try_in_child(file: Path, mtime_ns: int, size: int, deadline_s: float) -> str | None:
    """`why_not`, of the file with this time and size, which are keys of the cache alone."""
    code = (
        "import sys; from longshift.documents.trial import encode_probes;"
        " encode_probes(*sys.argv[1:])"
    )
    command = [sys.executable, "-P", "-c", code, str(file), str(deadline_s), str(os.getpid())]
    late = (
        f"it does not cut a few short texts within {deadline_s:g} s: look for a pattern of its"
        " pre_tokenizer that never ends"
    )
    try:
        child = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=WAITS * deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return late
    if child.returncode == -signal.SIGPROF:
        return late
    if child.returncode == 0:
        return None

    # The last line of a panic or a traceback says what is wrong.
    lines = [line for line in child.stderr.decode(errors="replace").splitlines() if line.strip()]
    message = " ".join(lines[-1:])[:300]
    if child.returncode < 0:
        return f"the library of tokenizers was ended by signal {-child.returncode}: {message}"
    return f"its library fails: {message}"


def encode_probes(file: str, deadline_s: str, parent: str) -> None:
    """Open a tokenizer and cut the probes.

    The process ends with an exit code other than 0 where that fails, and by SIGPROF where it
    computes for longer."""
    end_with_parent(signal.SIGKILL, int(parent))
    signal.setitimer(signal.ITIMER_PROF, float(deadline_s))
    core = tokenizers.Tokenizer.from_file(file)
    core.no_truncation()
    core.no_padding()
    ids = core.get_vocab().values()
    if not ids:
        sys.exit("it holds no tokens")
    largest = max((token_id for text in PROBES for token_id in core.encode(text).ids), default=0)
    core.encode_batch_fast(list(PROBES))  # the call that documents take

    # A post-processor may add an id that no token has.
    if largest > max(ids):
        sys.exit(
            f"it gives id {largest}, and the largest of its tokens is {max(ids)}: see its"
            " post_processor"
        )
