"""What commands print."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from longshift.config import Config
from longshift.layout.layout import format_size
from longshift.trainer.metrics import read_rows
from longshift.trainer.run_folder import RunFolder

CHECKED = {"loss": "loss", "grad": "gradients", "weight": "weights", "optimizer": "moments"}


def show_corpus(found: Mapping[str, Any], max_len: int) -> None:
    """Print what `survey` found."""
    spread = ", ".join(f"{name} {tokens:,}" for name, tokens in found["quantiles"].items())
    reasons = Counter(why for _, why in found["skipped"])
    print(f"{found['documents']:,} documents, {found['tokens']:,} tokens; length {spread}")
    if reasons:
        print(f"skipped files: {', '.join(f'{n} {why}' for why, n in reasons.items())} (--json names them)")
    for note in found["notes"]:
        print(f"note: {note}")
    console = Console(highlight=False)
    console.print(length_table(found["histogram"]), "", cap_table(found["caps"], found["tokens"], max_len))
    if "sample" in found:
        marks, how = (("", ""), "in green") if console.is_terminal else (("[[", "]]"), "in [[ ]]")
        console.print(f"\n{found['learned']:,} tokens are learned ({found['learned'] / found['tokens']:.1%}), here {how}:\n")
        pieces = ((marks[0] + text + marks[1], "green") if learned else (text, "dim") for text, learned in found["sample"])
        console.print(Text.assemble(*pieces), soft_wrap=True)


def show_check(found: Mapping[str, Any]) -> None:
    """Print how layouts that computed the same batches differ, and the verdict."""
    print(f"{found['documents']} documents, {found['tokens']:,} tokens; loss {found['reference_loss']:.4f} in {found['reference']}")
    staged = len({row["stage"] for row in found["rows"]}) > 1
    table = Table(*["stage"] * staged, "layout", "as", *CHECKED.values(), "leaked", box=None)
    for row in found["rows"]:
        stage = [str(row["stage"])] * staged
        differences = (f"{row[kind]:.1e}" for kind in CHECKED)
        table.add_row(*stage, row["layout"], row["as"], *differences, f"{row['leaked_positions']} of {row['probed_positions']}")
    Console(highlight=False).print(table)
    for line in found["not_exercised"]:
        print(f"not exercised: {line}")
    worst = ", ".join(f"{name} {found[kind]:.1e}" for kind, name in CHECKED.items())
    faults = f"{found['leaked_positions']} leaked positions, {found['wrong_labels']} wrong labels"
    print(f"{'PASS' if found['pass'] else 'FAIL'}: {worst}, {faults}; the tolerance of float64 is {found['tolerance']:.0e}")


def length_table(bins: Sequence[Mapping[str, int]]) -> Table:
    """Share of documents and of tokens in each range of lengths."""
    documents, tokens = (sum(bin[what] for bin in bins) for what in ("documents", "tokens"))
    table = Table("length", "documents", "tokens", "share of tokens", box=None)
    for bin in bins:
        share = bin["tokens"] / tokens
        bar = "█" * round(40 * share)
        table.add_row(f"to {format_size(bin['high'])}", f"{bin['documents'] / documents:.1%}", f"{share:.1%}", bar)
    return table


def cap_table(caps: Sequence[Mapping[str, int]], tokens: int, max_len: int) -> Table:
    """What each cap on the length would cost under the three policies."""
    table = Table("max_len", "longer documents", "split: pieces", "truncate: lost", "drop: lost", box=None)
    for row in caps:
        mark = " (this config)" if row["cap"] == max_len else ""
        lost = (f"{row[f'{policy}_tokens'] / tokens:.1%}" for policy in ("truncate", "drop"))
        table.add_row(format_size(row["cap"]) + mark, f"{row['documents']:,}", f"{row['split_pieces']:,}", *lost)
    return table


def peaks_and_differences(found: Mapping[str, Any]) -> tuple[Table, str, Table]:
    """Of a recorded step: peaks by rank, and the operations after which bytes differ most from what was predicted."""
    peaks, rows = Table("rank", "operations", "peak recorded", "predicted", "ratio", box=None), Table(box=None)
    for row in found["ranks"]:
        sizes = (f"{row[what]:,}" for what in ("operations", "recorded", "predicted"))
        peaks.add_row(str(row["rank"]), *sizes, f"{row['ratio']:.4f}" + ("" if row["within"] else "  differs"))
    for name in ("rank", "no.", "bytes after", "recorded", "predicted", "difference", "alike"):
        rows.add_column(name)
    for row in found["differences"]:
        sizes = row["recorded"] or 0, row["predicted"] or 0, row["difference"], row["alike"]
        rows.add_row(str(row["rank"]), str(row["number"]), row["op"], *(f"{size:,}" for size in sizes))
    return peaks, "", rows


def farewell(run: Config, folder: RunFolder, as_json: bool) -> bool:
    """Where the run is, and what can be done with it. Whether it is finished."""
    rows = read_rows(folder.metrics)
    done, first, last = (rows[-1]["step"], rows[0]["loss"], rows[-1]["loss"]) if rows else (0, float("nan"), float("nan"))
    done = max(done, folder.steps_saved())  # a machine that lost power may have kept the checkpoint and not the row
    early = bool(rows) and rows[-1].get("early", False)
    finished = done >= run.train.steps or early
    resume = folder.resume_command + (f" train.steps={2 * done}" if finished and not run.train.stages and not early else "")
    if as_json:
        facts = {"run": str(folder.path), "steps": done, "finished": finished, "export": folder.export_command, "resume": resume}
        print(json.dumps(facts), flush=True)
        return finished
    how = "ended early, for validation becomes no better," if early else "finished" if finished else "stopped"
    print(f"run     {folder.shown}: {how} at step {done} of {run.train.steps}, loss {first:.3f} -> {last:.3f}")
    if losses := {row["step"]: row["valid_loss"] for row in rows if row.get("valid_loss") is not None}:
        best = min(losses, key=losses.__getitem__)
        print(f"valid   loss {losses[best]:.4f} after step {best} is the lowest; export that step with --best")
    print(f"export  {folder.export_command}")
    print(f"resume  {resume}", flush=True)
    return finished
