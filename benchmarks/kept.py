"""Results that are kept, and what the tables of all benchmarks have in common."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
K, MIB = 1024, 2**20
CHUNKED = ("fpdt", "stream")  # rungs of long_ladder.py that compute a document in chunks


def result(benchmark: str, section: str | None = None) -> dict:
    """A report that is kept."""
    found = json.loads((RESULTS / f"{benchmark}.json").read_text())
    return found if section is None else found["sections"][section]


def source(report: Mapping) -> str:
    """When, at which commit and on what machine it was measured, and at which commit judged anew."""
    words = ["Measured"]
    if "date" in report:
        words.append(f"on {report['date']}")
    commit, changed, _ = (report.get("commit") or "").partition("+")
    words.append(f"at commit `{commit[:7]}`{changed and ' with changes'}" if commit else "at a commit that was not recorded")
    if "machine" in report:
        facts = report["machine"]
        cpu, plural = facts["cpu"].replace("(R)", ""), "s" * (facts["cores"] > 1)
        gpus = ", ".join(facts["gpus"]) or "no GPU"
        words.append(f"on {facts['cores']} core{plural} of an {cpu} with {facts['memory_gib']:.0f} GiB, {gpus}")
    judged = f" Judged at commit `{report['judged_at'][:7]}`." if "judged_at" in report else ""
    return f"{' '.join(words)}, torch {report['versions']['torch']}.{judged}"


def sources(reports: Mapping[str, Mapping]) -> str:
    """A list of what was measured where, and why a section is older than the newest."""
    alike: dict[str, list[str]] = {}
    for name, report in reports.items():
        alike.setdefault(f"{source(report)} {report.get('older', '')}".rstrip(), []).append(name)
    return "\n".join(f"- {'; '.join(names)}: {sentence}" for sentence, names in alike.items())


def lines(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of Markdown."""
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows))


def size(tokens: int) -> str:
    """Tokens, as layouts write them."""
    return f"{tokens // MIB}M" if tokens % MIB == 0 else f"{tokens // K}K"


def computed(report: Mapping) -> str:
    """A sentence: at which commit it was computed."""
    commit = (report.get("commit") or "").partition("+")[0]
    return f"Computed on {report['date']} at commit `{commit[:7]}`."
