"""Fuzzing: what a person, or a damaged disk, may put into a file, and what became of it.

A case is a function of a random generator that writes files into a folder and reads them as the product does. It runs in a forked child
with a deadline. What may come of it:

accepted    nothing was raised
refused     a LongshiftError that says where: a file, a key or a line of what was written
silent      the case found that what was read is not what was written, and raised Silent: a failure
            anything else is a failure: a traceback, a hang, a death, an error that does not say where
"""

import os
import random
import resource
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from longshift.errors import LongshiftError

Case = Callable[[random.Random, Path], object]
DEADLINE_S, MEMORY_BYTES = 20.0, 6 << 30
GOOD = ("accepted", "refused")


class Silent(Exception):
    """Something was read as what it is not."""


@dataclass
class Verdicts:
    """What became of the cases of a surface; `bad`: the seed of each failure, with what is known of it."""

    counts: Counter = field(default_factory=Counter)
    bad: list[tuple[int, str, str]] = field(default_factory=list)


def fuzz(case: Case, cases: int, seed: int = 0, words: tuple[str, ...] = ()) -> Verdicts:
    """Play a case so many times. `words`: an error says where if one of them, or the folder, is in it."""
    found = Verdicts()
    for number in range(seed, seed + cases):
        verdict, why = played(case, number, words)
        found.counts[verdict] += 1
        if verdict not in GOOD:
            found.bad.append((number, verdict, why))
    return found


def played(case: Case, seed: int, words: tuple[str, ...] = ()) -> tuple[str, str]:
    """The verdict on one case, and why."""
    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        os._exit(_child(case, seed, place, words, writes))
    os.close(writes)
    text, ended = b"", False
    deadline = time.monotonic() + DEADLINE_S
    while not ended and (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([reads], [], [], left)
        if ready:
            piece = os.read(reads, 1 << 16)
            text, ended = text + piece, not piece
    os.close(reads)
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    shutil.rmtree(place, ignore_errors=True)
    if not ended:
        return "hang", f"no answer within {DEADLINE_S:.0f} s"
    verdict, _, why = text.decode(errors="replace").partition("\n")
    if os.waitstatus_to_exitcode(status) or not verdict:
        return "death", f"ended with {os.waitstatus_to_exitcode(status)}"
    return verdict, why


def _child(case: Case, seed: int, place: Path, words: tuple[str, ...], writes: int) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    try:
        case(random.Random(seed), place)
        said = "accepted\n"
    except LongshiftError as fault:
        located = any(word in str(fault) for word in (str(place), *words))
        said = ("refused\n" if located else "unlocated\n") + str(fault)
    except Silent as fault:
        said = f"silent\n{fault}"
    except BaseException:
        said = "traceback\n" + traceback.format_exc()
    os.write(writes, said.encode(errors="replace")[: 1 << 15])
    return 0


# Values that nobody meant

ODD_TEXT = (
    *("", " ", "~", "null", "true", "no", "on", "0x_", "0x10", "1_000", "010", "1e400", ".inf", "-.inf", ".nan", "2024-99-99", "12:30:45"),
    *(
        "!!float abc",
        "!!timestamp x",
        "!!bool xyz",
        "!!python/object/apply:os.getcwd []",
        "&a [*a]",
        "*a",
        "&a b",
        "[",
        "{",
        "]",
        "}",
        "- -",
    ),
    *("[" * 40 + "]" * 40, "{a: " * 30 + "1" + "}" * 30, "9" * 5000, "-1", "1.5", "10" * 15, "1e30", "\ud800", "\0", '"\\0"', "\x1b[31m"),
    *(
        "~nosuchuser/x",
        "a" * 300,
        "/" * 5000,
        "../../../etc/passwd",
        "/dev/null",
        "/proc/self/mem",
        "%s%n",
        "${HOME}",
        "'",
        '"',
        "#",
        "\n",
        ": ",
    ),
    *(
        "dp1000000",
        "dp2.dp2",
        "pp9999999.v99999",
        "tp0",
        "chunk0",
        "dp" * 400,
        "dp2.zz",
        "u-1",
        "[{upto: 1, use: dp1}]",
        "auto",
        "{type: yarn}",
    ),
)
ODD_VALUES: tuple[object, ...] = (
    *(None, True, False, 0, -1, 1, 1.5, 1e308, float("inf"), float("nan"), 10**18, 10**30, -(10**30), "", "x", "1", "true", "\0", "\ud800"),
    *([], [None], ["x"], [[]], {}, {"x": 1}, {"": None}, "a" * 10_000, [1] * 5000, {str(n): n for n in range(3000)}),
)


def nested(random_: random.Random, depth: int) -> object:
    """Lists and mappings inside each other, so deep."""
    value: object = 1
    for _ in range(depth):
        value = [value] if random_.random() < 0.5 else {"a": value}
    return value


def odd_json(random_: random.Random) -> object:
    return nested(random_, random_.choice((2, 20, 900))) if random_.random() < 0.1 else random_.choice(ODD_VALUES)


def spoil_mapping(random_: random.Random, values: dict, most: int = 3) -> dict:
    """A mapping of which some values are others, keys gone or new."""
    values = dict(values)
    for _ in range(random_.randint(1, most)):
        key = random_.choice(list(values) or ["x"])
        how = random_.random()
        if how < 0.1:
            values.pop(key, None)
        elif how < 0.2:
            values[random_.choice(("", "x", key + "s", key.upper()))] = odd_json(random_)
        elif isinstance(values.get(key), dict) and how < 0.7:
            values[key] = spoil_mapping(random_, values[key], 1)
        else:
            values[key] = odd_json(random_)
    return values


def spoil_bytes(random_: random.Random, data: bytes) -> bytes:
    """Bytes flipped, cut out, doubled, cut off or written over."""
    out = bytearray(data)
    for _ in range(random_.choice((1, 1, 1, 2, 8, 64))):
        if not out:
            break
        at, how = random_.randrange(len(out)), random_.random()
        if how < 0.5:
            out[at] ^= 1 << random_.randrange(8)
        elif how < 0.6:
            del out[at : at + random_.choice((1, 4, 100))]
        elif how < 0.7:
            out[at:at] = out[at : at + random_.choice((1, 4, 100))]
        elif how < 0.8:
            del out[at:]
        else:
            out[at : at + 8] = random_.choice((b"\0" * 8, b"\xff" * 8, bytes(random_.randrange(256) for _ in range(8))))
    return bytes(out)


def summary(found: Mapping[str, Verdicts]) -> dict[str, int]:
    """How many cases of all surfaces had each verdict."""
    total: Counter = sum((verdicts.counts for verdicts in found.values()), Counter())
    names = {"tracebacks": "traceback", "hangs": "hang", "deaths": "death", "unlocated": "unlocated", "silent": "silent"}
    return {"cases": total.total(), **{name: total[verdict] for name, verdict in names.items()}, **{name: total[name] for name in GOOD}}
