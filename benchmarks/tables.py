"""The tables in README.md and docs: of measurements, from the results that are kept; of references, from the code.

`python benchmarks/tables.py` rewrites every block between `<!-- table: NAME -->` and `<!-- end -->`. With `--check` it writes nothing and
exits with 1 where a block is not what the results say. `--keep REPORT [--section NAME]` first puts what a benchmark printed with `--json`
into `results/`, one file a benchmark. A file holds one report, or named sections: a report each, with its own commit, machine and options.
`older` says why a section is not of the newest code.
"""

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import gpu_tables
import kept
import plan_tables
import reference_tables
import summaries
from kept import CHUNKED, K, lines, result, size, source, sources

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
METHODS = {  # names of long_context.py to words of layouts
    "recompute": "recompute-full",
    "selective": "torch's selective checkpointing",
    "selective tiled": "torch's selective checkpointing, kernel of `model/tiled_attention.py`",
    "recompute+offload": "recompute-full, tier",
    "fpdt": "fpdt",
    "stream input": "chunks, keep-input",
    "stream input every4": "chunks, keep-input, every4",
    "stream": "chunks",
    "stream every4": "chunks, every4",
    "stream kv-offload": "chunks, kv-offload",
    "stream on the device": "chunks, all on the device",
}
MACHINES = {("plain", 1): "one node of {} ranks", ("scale-model", 2): "2 nodes of {} ranks"}


def by_length() -> str:
    """Tokens a second and memory by method and length, the longest of an older run."""
    new, old = result("long_context", "by length"), result("long_context", "256K")
    rows = {(row["method"], row["tokens"]): row for report in (new, old) for row in report["rows"]}
    lengths = sorted({tokens for _, tokens in rows})
    methods = list(dict.fromkeys(method for method, _ in rows))
    times = [rows["stream", tokens]["rounds"] for tokens in lengths]

    def ratio(other: str, tokens: int) -> str:
        return f"{rows['stream', tokens]['tokens_per_s'] / rows[other, tokens]['tokens_per_s']:.2f}"

    cells = [[METHODS.get(m, m), *(f"{rows[m, n]['tokens_per_s']:.0f}, {rows[m, n]['peak_mib']:.0f}" for n in lengths)] for m in methods]
    cells += [[f"*chunks over {METHODS[m]}*", *(ratio(m, n) for n in lengths)] for m in ("recompute", "selective", "fpdt")]
    head = ["tokens/s, MiB", *(size(n) + " †" * (n == old["rows"][0]["tokens"]) for n in lengths)]
    said = f"Each figure is the median of the rounds, of which the lengths had {', '.join(map(str, times))}; spreads were not kept."
    return f"{source(new)} {said}\n\n{lines(head, cells)}\n\n† {source(old)} {old['older']}"


def others() -> str:
    """The other runs of long_context.py, section by section."""
    found = {name: report for name, report in result("long_context")["sections"].items() if name not in ("by length", "256K")}
    rows = [
        (
            *(name, METHODS.get(row["method"], row["method"]), size(row["tokens"]), row["rounds"], f"{row['tokens_per_s']:.0f}"),
            *(f"{row['peak_mib']:.0f}", f"{row.get('tier_mib', 0):.0f}", f"{row.get('waited_s', 0) / row['seconds']:.1%}"),
        )
        for name, report in found.items()
        for row in report["rows"]
    ]
    head = ("run", "method", "tokens", "rounds", "tokens/s", "MiB", "MiB in the tier", "of the step waited for the tier")
    return f"Each figure is the median of the rounds; spreads were not kept.\n\n{lines(head, rows)}\n\n{sources(found)}"


def ladder(memory: str) -> Callable[[], str]:
    """Makes the table of the longest documents by rung and ranks, at that memory a rank."""

    def made() -> str:
        found = {name: report for name, report in result("long_ladder")["sections"].items() if name.startswith(memory)}
        best: dict[tuple[str, int], dict] = {}
        for report in found.values():
            for row in report["rows"]:
                best[row["rung"], row["ranks"]] = max(
                    row, best.get((row["rung"], row["ranks"]), row), key=lambda row: row["longest_tokens"]
                )
        ranks = sorted({number for _, number in best})
        rungs = sorted(dict.fromkeys(rung for rung, _ in best), key=CHUNKED.count)
        rows = [[METHODS.get(rung, rung), *(rung_cell(best.get((rung, n))) for n in ranks)] for rung in rungs]
        whole = {n: max(row["longest_tokens"] for (rung, m), row in best.items() if m == n and rung not in CHUNKED) for n in ranks}
        rows.append(["*chunks: times as long*", *(f"{best['stream', n]['longest_tokens'] / whole[n]:.0f}" for n in ranks)])
        rows.append(["*chunks: times as fast*", *(f"{statistics.median(speeds(found.values(), n)):.2f}" for n in ranks)])
        head = ("longest document, tokens/s, MiB", *(f"{n} rank{'s' * (n > 1)}" for n in ranks))
        return f"Each figure is of one step. * is a document of as many tokens as were tried.\n\n{lines(head, rows)}\n\n{sources(found)}"

    return made


def rung_cell(row: Mapping | None) -> str:
    """The longest document of a rung, its tokens a second and its memory."""
    if row is None:
        return ""
    return f"{size(row['longest_tokens'])}{' *' * (row['ended_by'] == 'most')}, {row['tokens_per_s']:.0f}, {row['peak_mib']:.0f}"


def speeds(reports: Iterable[Mapping], ranks: int) -> list[float]:
    """Tokens a second by chunks over those of the best other rung, at the lengths that both train in one run."""
    for report in reports:
        mine = next((row["rates"] for row in report["rows"] if (row["rung"], row["ranks"]) == ("stream", ranks)), None)
        whole = [row for row in report["rows"] if row["rung"] not in CHUNKED and row["ranks"] == ranks]
        if mine and whole:
            rates = max(whole, key=lambda row: (row["longest_tokens"], row["tokens_per_s"]))["rates"]
            return [mine[n] / rate for n, rate in rates.items() if n in mine]
    return []


def gpu_name(row: Mapping) -> str:
    """Method and chunk."""
    name, chunk = METHODS[row["method"]], re.match(r"chunk(\d+K)", row["layout"])
    if chunk is None:
        return name
    return name.replace("chunks", f"chunks of {chunk[1]}") if "chunks" in name else f"{name}, chunks of {chunk[1]}"


def gpu_memory() -> str:
    """GiB on the device that is not there, by method and length."""
    report = result("gpu_long_context")
    rows = {(gpu_name(row), row["tokens"]): row for row in report["rows"]}
    lengths = sorted({tokens for _, tokens in rows})
    cells = [
        (name, *(f"{rows[name, n]['device_peak_gib']:.1f}" for n in lengths), f"{rows[name, lengths[-1]].get('tier_peak_gib', 0):.1f}")
        for name in dict.fromkeys(name for name, _ in rows)
    ]
    head = ("GiB on the device", *map(size, lengths), f"GiB in the tier at {size(lengths[-1])}")
    return f"{counted(report)}\n\n{lines(head, cells)}"


def counted(report: Mapping) -> str:
    """A sentence: what the fake device counts, and at which commit."""
    return f"{source(report).replace('Measured', 'Counted')} The device is {report['device']}. A count has no spread."


def gpu_work() -> str:
    """What a step of 512K tokens asks of a device."""
    report = result("gpu_long_context")
    rows = [
        (
            *(gpu_name(row), f"{row['attention_flops'] / 1e15:.1f}", f"{row['matmul_flops'] / 1e15:.1f}"),
            *(f"{row['other_bytes'] / 1e12:.1f}", f"{row.get('put_gib', 0):.0f}, {row.get('fetched_gib', 0):.0f}", f"{share(row):.2f}"),
        )
        for row in report["rows"]
        if row["tokens"] == 512 * K
    ]
    head = ("method", "PFLOP of attention", "of matmuls", "TB of all else", "GiB out, in", "share of 650 TFLOP/s")
    return f"{counted(report)}\n\n{lines(head, rows)}"


def share(row: Mapping) -> float:
    """The model's FLOP over what 650 TFLOP/s would do in the time that the rates assumed for each kind of work take."""
    seconds = row["matmul_flops"] / 650e12 + row["attention_flops"] / 450e12 + row["other_bytes"] / 4e12
    return row["model_flops"] / seconds / 650e12


def groups_name(text: str) -> str:
    """Layouts by length in words; all have z1."""
    parts = [part.split(": ") for part in text.replace(".z1", "").split(" > ")]
    return ", ".join(f"{layout} to {size(int(upto))}" for upto, layout in parts[:-1]) + ", " * (len(parts) > 1) + parts[-1][1]


def scheme_name(row: Mapping) -> str:
    """What a row of hot_switch.py computes, in words."""
    if row["scheme"].startswith("fsdp2"):
        return "torch FSDP2"
    return groups_name(row["groups"]) + (", padded" if "padded" in row["scheme"] else "")


def hot(section: str) -> Callable[[], str]:
    """Makes the two tables of a section of hot_switch.py: its schemes, and the best of them by memory."""

    def made() -> str:
        report = result("hot_switch", section)
        rows = sorted(report["rows"], key=lambda row: (row["scheme"].split(":")[0], row["peak_mib"]))
        schemes = [
            (
                *(scheme_name(row), f"{row['peak_mib']:.0f}", f"{row['tokens_per_s']:.0f}"),
                *(f"{min(row['by_step']):.0f} to {max(row['by_step']):.0f}", len(row["by_step"]), "" if row["interleaved"] else "warm-up"),
            )
            for row in rows
        ]
        (compared,) = report["summary"]["compared"].values()
        alike: dict[tuple[str, ...], list[float]] = {}
        for found in compared:
            if found["hot"]:
                ratios = tuple(against(found[what]) for what in ("static_all", "static_tp_pp", "bucket_padded"))
                alike.setdefault((groups_name(found["hot"]), *ratios), []).append(found["budget_mib"])
        budgets = [[", ".join(f"{mib:.0f}" for mib in mibs), *cells] for cells, mibs in alike.items()]
        said = f"{source(report)} {report.get('older', '')}".rstrip()
        one = lines(("scheme", "peak MiB", "tokens/s, median", "lowest to highest", "steps", ""), schemes)
        two = lines(
            ("budget, MiB", "hot switching is", "speedup over best single layout", "over best of dp, tp, pp, ZeRO", "over padded"), budgets
        )
        return f"{said}\n\n{one}\n\n{two}"

    return made


def against(found: Mapping | None) -> str:
    """A ratio with its spread, and to what."""
    if found is None:
        return ""
    spread = "" if found["spread"] is None else f" ± {found['spread']:.2f}"
    return f"{found['ratio']:.2f}{spread} ({groups_name('0: ' + found['to'].split(':', 1)[1])})"


def switches() -> str:
    """Switches by machine and planner."""
    report = result("switch_cost")
    planners = ("fan_out", "algorithm1", "first_owner")
    places = dict.fromkeys((row["machine"], row["ranks"], row["nodes"]) for row in report["rows"])
    rows = []
    for kind, ranks, nodes in places:
        here = [row for row in report["rows"] if (row["machine"], row["ranks"]) == (kind, ranks)]
        cells = []
        for planner in planners:
            some = [row for row in here if row["planner"] == planner]
            milliseconds, moved = sum(row["measured_s"] for row in some) * 1e3, sum(row["inter_node_bytes"] for row in some) / 1e6
            cells.append(f"{milliseconds:.0f}, {moved:.0f}, {statistics.median(row['fraction_of_bound'] for row in some):.2f}")
        name = MACHINES[kind, nodes].format(ranks // nodes)
        rows.append([f"{name}, {len(here) // len(planners)} switches", *cells])
    median = report["summary"]["fraction_of_bound_median"]
    rows.append(["*all, median share of the bound*", *(f"{median[planner]:.2f}" for planner in planners)])
    head = ("ms of all switches, MB between nodes, share of the bound", *planners)
    (repeats,) = re.findall(r"--repeats (\d+)", report["command"])
    apart = statistics.median(row["spread"] for row in report["rows"])
    said = f"Each switch is the median of {repeats} repeats, whose quartiles are {apart:.0%} of it apart in the median switch."
    return f"{source(report)} {said}\n\n{lines(head, rows)}"


def static() -> str:
    """Longshift against the fastest peer that does the same, in both precisions."""
    report = result("static")
    found, spread, peer = (report["summary"][key] for key in ("ratio_to_best_peer", "ratio_spread", "best_peer"))
    row_of = {(row["system"], row["layout"], row["dtype"]): row for row in report["rows"]}

    def cells(layout: str, dtype: str) -> list[str]:
        return [f"{row_of['longshift', layout, dtype]['tokens_per_s']:.0f}", f"{found[layout][dtype]:.2f} ± {spread[layout][dtype]:.2f}"]

    rows = [[layout, peer[layout]["float32"].split()[0], *cells(layout, "float32"), *cells(layout, "bf16")] for layout in found]
    head = ("layout", "fastest peer", "float32: tokens/s", "ratio", "bf16: tokens/s", "ratio")
    said = "Ratios are medians over 6 interleaved rounds of 2 steps; ± is the distance between the quartiles over the median."
    return f"{source(report)} {said}\n\n{lines(head, rows)}"


def ledger() -> str:
    """Memory and bytes sent, recorded and predicted; and the seconds to weigh large runs."""
    report = result("ledger")
    kinds: dict[str, list[dict]] = {}
    for row in report["rows"]:
        kinds.setdefault(kind_of(row), []).append(row)
    rows = []
    for kind, some in kinds.items():
        ratios, sent = [row["ratio"] for row in some], sum(row["sent"] == row["sent_predicted"] for row in some)
        rows.append(
            (kind, len({row["layout"] for row in some}), len(some), f"{min(ratios):.3f} to {max(ratios):.3f}", f"{sent} of {len(some)}")
        )
    head = ("steps of", "layouts", "ranks", "peak recorded / predicted", "ranks that sent the bytes predicted")
    admitted = [(name, f"{seconds:.2f}") for name, seconds in report["summary"]["admission_s"].items()]
    said = f"{source(report)} Counts of bytes have no spread; seconds are of one run."
    return f"{said}\n\n{lines(head, rows)}\n\n{lines(('run', 'seconds of a core until its memory is known'), admitted)}"


def kind_of(row: Mapping) -> str:
    """What sort of step a row of ledger.py is of."""
    if row["device"] == "fake":
        return "Llama 3 8B's width, no real device"
    if row.get("few"):
        return "packs of many chunks, from few"
    return "several layouts" if " > " in row["layout"] else "one layout"


def machine_profile() -> str:
    """How far two profiles of one machine differ."""
    report = result("machine_profile")
    rows = {row["what"]: row for row in report["rows"]}
    names = [what.split(" ", 1)[1] for what in rows if what.startswith("quick")]
    cells = [
        [
            name.replace("_", "-"),
            *(f"{rows[f'{how} {name}']['difference']:.1%}, {rows[f'{how} {name}']['points']}" for how in ("quick", "full")),
        ]
        for name in names
    ]
    said = "A figure is the median of the relative differences of two profiles, and of how many points; no further spread was kept."
    return f"{source(report)} {said}\n\n{lines(('family', 'quick', 'full'), cells)}"


def homes() -> str:
    """What a step takes by where the training state lies, and by tokens, and what moving, updating and formats cost beside the plain."""
    report = result("state_tiers")
    rows = [
        (
            *(row["tokens"], row["home"], f"{row['step_s']:.2f}", f"{row['spread']:.0%}", f"{row['moved_mib']:.0f}"),
            *(f"{row['bound_s']:.2f}", f"{row['over_bound']:.2f}", f"{row['over_exact']:.2f}"),
        )
        for row in report["rows"]
        if row["part"] == "speed"
    ]
    head = (
        "tokens a step",
        "home",
        "seconds",
        "spread",
        "MiB moved",
        "bound, s",
        "seconds / bound",
        "seconds / two bounds",
    )
    found = report["summary"]
    said = [
        f"The file is read and written at {found['disk_share']:.2f} of the rate of a plain direct test of the same disk.",
        f"An update takes {found['adam_ratio']:.2f} times torch's fused AdamW, {found['adam_ratio_clipped']:.2f} with its clip.",
        f"The vertical order is {found['vertical_ratio']:.2f} times as fast as the plain one under `z3`.",
        f"The loss with moments in bf16 is {found['bf16_loss']:.4f} of that in float32, in float8 {found['float8_loss']:.4f}.",
    ]
    return f"{source(report)}\n\n{lines(head, rows)}\n\n{' '.join(said)}"


TABLES: Mapping[str, Callable[[], str]] = {
    **summaries.TABLES,
    "long-context": by_length,
    "long-context-others": others,
    "long-ladder": ladder("300 MiB"),
    "long-ladder-1g": ladder("1 GiB"),
    "gpu-memory": gpu_memory,
    "gpu-work": gpu_work,
    "gpu-measured": gpu_tables.measured_steps,
    "gpu-attention": gpu_tables.attention_kernels,
    "gpu-lengths": gpu_tables.attention_by_length,
    "gpu-kernels": gpu_tables.kernels_of_steps,
    "gpu-auto": gpu_tables.chosen_layouts,
    "hot-switch-python": hot("2 nodes of 2 ranks, python"),
    "hot-switch-text": hot("2 nodes of 2 ranks, text"),
    "hot-switch-8-ranks": hot("2 nodes of 4 ranks, text"),
    "hot-switch-plain": hot("2 plain ranks, python"),
    "switch-cost": switches,
    "static": static,
    "ledger": ledger,
    "published": plan_tables.published,
    "anchors": plan_tables.anchors,
    "plan-choice": plan_tables.plan_choice,
    "plan-choice-2x2": partial(plan_tables.plan_choice, "plan_choice_2x2"),
    "plan-choice-2x4": partial(plan_tables.plan_choice, "plan_choice_2x4"),
    "plan-corpora": plan_tables.plan_corpora,
    "machine-profile": machine_profile,
    "homes": homes,
    **reference_tables.TABLES,
}


def rewritten(text: str) -> str:
    """A page with its blocks as the results say."""
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]]() + "\n" + found[3], text)


def keep(report: Path, section: str | None) -> None:
    """Put a report, with today's date, into its benchmark's file, or into a section of it."""
    printed = json.loads(report.read_text())
    benchmark = printed.pop("benchmark")
    path = kept.RESULTS / f"{benchmark.replace('/', '_')}.json"
    dated = {"date": time.strftime("%Y-%m-%d"), **printed}
    if section is None:
        found = {"benchmark": benchmark, **dated}
    else:
        found = json.loads(path.read_text()) if path.exists() else {"benchmark": benchmark, "sections": {}}
        found["sections"][section] = dated
    path.write_text(written(found) + "\n")


def written(found: Mapping) -> str:
    """JSON with a line for every key of a report and for every row."""

    def line(key: str, value: object) -> str:
        if key == "sections" and isinstance(value, dict):
            return '"sections": {\n' + ",\n".join(f"{json.dumps(name)}: {written(report)}" for name, report in value.items()) + "\n}"
        if key == "rows" and isinstance(value, list):
            return '"rows": [\n' + ",\n".join(map(json.dumps, value)) + "\n]"
        return f"{json.dumps(key)}: {json.dumps(value)}"

    return "{\n" + ",\n".join(line(*item) for item in found.items()) + "\n}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a block differs")
    parser.add_argument("--keep", type=Path, metavar="REPORT", help="a file of what a benchmark printed with --json")
    parser.add_argument("--section", help="of the benchmark's file, for --keep")
    options = parser.parse_args()
    if options.keep:
        keep(options.keep, options.section)
    differ = [page for page in PAGES if page.read_text() != rewritten(page.read_text())]
    for page in differ:
        print(f"{page.relative_to(ROOT)} {'is not' if options.check else 'is now'} what the results say")
        if not options.check:
            page.write_text(rewritten(page.read_text()))
    return 1 if options.check and differ else 0


if __name__ == "__main__":
    sys.exit(main())
