"""Tables of what is planned and predicted; see `tables.py`."""

from statistics import median

from kept import MIB, K, computed, lines, result, source


def published() -> str:
    """Errors of predicted seconds by source, and what a planner would lose by them."""
    report = result("published")
    rows = []
    for name, found in sorted(report["by_source"].items(), key=lambda one: -one[1]["raw"]["rows"]):
        after = found.get("calibrated")
        shown = (f"{part['median']:.1%}, {part['mean']:.1%}" if part else "" for part in (found["raw"], after))
        rows.append((" ".join(name.split()[:4]).rstrip(":;"), found["raw"]["rows"], *shown))
    rows.append(("all", sum(row[1] for row in rows), f"mean {report['mean_raw']:.1%}", f"mean {report['mean_calibrated']:.1%}"))
    head = ("source", "steps", "median, mean error", "after three of its steps")
    right, first, best = (f"{report[name]:.1%}" for name in ("pairs_right", "regret_first", "regret_best_of_3"))
    pairs = f"Of {report['pairs']:,} pairs of one model and cluster that differ by more than 5 %, {right} are in the right order."
    regret = f"The layout that comes first takes {first} longer than the best on average, the best of three {best}."
    return f"{computed(report)}\n\n{lines(head, rows)}\n\n{pairs} {regret}"


def anchors() -> str:
    """Whole runs of papers and talks beside what is predicted of them."""
    report = result("anchors")
    hotspa, stages, talk = report["hotspa"], report["stages"], report["talk"]
    steps = [
        (f"{row['law']}, {row['set']}", f"{row['published_s']:.1f}",
         *(f"{row[f'{way}_s']:.1f}, {row[f'{way}_error']:+.1%}" for way in ("predicted", "modelled")),
         f"{row['published_others_s']:.1f}, {row['switch_s']:.1f}")
        for row in hotspa["rows"]
    ]  # fmt: skip
    head = "HotSPa, Table 3", "seconds", "by Hydraulis' stage times", "by our cost model", "switches: theirs, ours"
    bytes_ = [
        (f"{row['longest'] // K}K, `{row['strategy']}`", f"{row['published_gib']:.1f}",
         f"{row['ledger_gib']:.1f}, {row['over']:+.0%}", f"{row['as_theirs_gib']:.1f}, {row['as_theirs_over']:+.0%}",
         f"{row['published_s']:,.0f}, {row['clock_s']:,.0f}")
        for row in talk["rows"]
    ]  # fmt: skip
    talk_head = "FPDT talk, Llama 3 8B", "GiB", "ours", "as theirs", "seconds: by their MFU, our clock"
    runs = [
        (f"{row['devices']:,} H100, {row['length'] // K}K", f"`{row['layouts']['best']}`, {row['seconds']['best']:.2f}",
         f"`{row['layouts']['tp8.pp16']}`, {row['tp8.pp16_over_best']:+.1%}",
         f"`{row['layouts']['theirs']}`, {row['theirs_over_best']:+.0%}",
         f"{row['seconds']['published']:.2f}, {row['seconds']['without_recompute']:.2f}")
        for row in report["llama3"]["rows"]
    ]  # fmt: skip
    run_head = "Llama 3 405B", "best layout, seconds", "best with tp8.pp16", "their mesh, where it fits", "as they ran it: published, ours"
    middle = max(one["worst"] for end, one in stages["by_length"].items() if 4 * K <= int(end) <= 16 * K)
    times = f"Beside {len(stages['rows'])} stages' times our cost model's errors have a median of {stages['median']:.1%}"
    worst = f"{times} and a worst of {stages['worst']:.1%}, from 4K to 16K of {middle:.1%}."
    found = f"`{hotspa['search']}` takes {hotspa['search_over_c1']:.2f} of C1's seconds, padded {hotspa['padded_search_over_c1']:.2f}"
    need = f"It needs {hotspa['search_gib']:.0f} GiB of a device, C1 {hotspa['c1_gib']:.0f}, by the ledger."
    within = talk["within_0.15"]
    few = f"Within 15 %: {within['over']} of ours, {within['as_theirs_over']} as theirs."
    tables = f"{lines(head, steps)}\n\n{worst} The plan {found}. {need}\n\n{lines(talk_head, bytes_)}\n\n{few}\n\n{lines(run_head, runs)}"
    return f"{computed(report)}\n\n{tables}"


def plan_corpora() -> str:
    """What plans gain over single layouts and padding, by model, cluster, corpus and longest document."""
    report = result("plan_corpora")
    rows = []
    for row in report["rows"]:
        named = f"{row['model']}, {row['on']}", row["corpus"], f"{row['longest'] // K}K"
        if "auto" not in row:
            rows.append((*named, "nothing fits", "", "", ""))
            continue
        times = (row[f"{kind}_over_auto"] for kind in ("single", "context_parallel", "padded"))
        rows.append((*named, f"`{row['auto']}`", *(f"{value:.2f}" if value else "" for value in times)))
    head = ("model, devices", "corpus", "longest", "plan", "best single layout", "context parallelism alone", "padded")
    return f"{computed(report)} Times as many seconds as the plan takes, all on the clock.\n\n{lines(head, rows)}"


def plan_choice(name: str = "plan_choice") -> str:
    """Predicted and measured steps by corpus, and what the planner chose under budgets."""
    report = result(name)
    rows = []
    for corpus in dict.fromkeys(row["corpus"] for row in report["rows"]):
        ways = [row for row in report["rows"] if row["corpus"] == corpus]
        errors = [abs(row["calibrated"]) for row in ways if not row["calibrates"]]
        spread, raw = (median(abs(row[name]) for row in ways) for name in ("spread", "raw"))
        memory = (f"{pick(row['forecast'] for row in ways):+.0%}" for pick in (min, max))
        rows.append((corpus, len(ways), f"{spread:.0%}", f"{raw:.0%}", f"{median(errors):.1%}, {max(errors):.0%}", " to ".join(memory)))
    head = ("corpus", "ways", "spread", "clock error", "calibrated: median, worst", "memory forecast")
    chosen = [
        (row["corpus"], f"{row['tensors_bytes'] / MIB:.0f} MiB",
         *(f"`{row[name]}`" if row[name] else "" for name in ("auto", "best_static")),
         *(f"{row[name]:.2f}" if row.get(name) else "" for name in ("auto_over_best_static", "at_most", "auto_over_context_parallel")),
         f"{row['most_of_limit']:.2f}")
        for row in report["summary"]["budgets"]
    ]  # fmt: skip
    of_budgets = (
        *("corpus", "budget", "plan", "best single layout", "speedup"),
        *("speedup at most", "over context parallelism", "memory / budget"),
    )
    return f"{source(report)}\n\n{lines(head, rows)}\n\n{lines(of_budgets, chosen)}"
