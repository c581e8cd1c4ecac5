"""Tables of what is planned and predicted; see `tables.py`."""

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
    rows = [
        (
            f"HotSPa Table 3, {row['law']}, {row['set']}",
            f"{row['published_s']:.1f} s",
            f"{row['predicted_s']:.1f} s",
            f"{row['error']:+.1%}",
        )
        for row in report["hotspa"]["rows"]
    ]
    for row in report["talk"]["rows"]:
        named = f"FPDT talk, {row['longest'] // K}K tokens, `{row['strategy']}`"
        rows.append((named, f"{row['published_gib']:.1f} GiB", f"{row['ledger_gib']:.1f} GiB", f"{row['over']:+.0%}"))
    for row in report["llama3"]["rows"]:
        named = f"Llama 3 405B, {row['devices']:,} H100, {row['length'] // K}K: `{row['layouts']['tp8.pp16']}`"
        over = row["tp8.pp16_over_best"]
        rows.append((named, f"best: `{row['layouts']['best']}`", f"{row['seconds']['tp8.pp16']:.2f} s", f"{over:+.1%} of the best"))
    found = report["hotspa"]
    said = f"The plan for HotSPa's documents, `{found['search']}`, takes {found['search_over_c1']:.2f} of the seconds of their set C1."
    return f"{computed(report)}\n\n{lines(('what', 'published', 'here', 'difference'), rows)}\n\n{said}"


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


def plan_choice() -> str:
    """Predicted and measured steps, and what the planner chose under budgets."""
    report = result("plan_choice")
    rows = [
        (row["corpus"], f"`{row['way']}`", f"{row['measured_s']:.2f}", f"{row['spread']:.0%}", f"{row['raw']:+.0%}",
         "fits the factor" if row["calibrates"] else f"{row['calibrated']:+.1%}", f"{row['forecast']:+.0%}")
        for row in sorted(report["rows"], key=lambda row: (row["corpus"], row["measured_s"]))
    ]  # fmt: skip
    head = ("corpus", "way", "s a step", "spread", "clock", "with one factor", "memory forecast")
    chosen = [
        (row["corpus"], f"{row['tensors_bytes'] / MIB:.0f} MiB", f"`{row['auto']}`", f"`{row['best_static']}`",
         *(f"{value:.2f}" if value else "" for value in (row["auto_over_best_static"], row["auto_over_context_parallel"])))
        for row in report["summary"]["budgets"]
    ]  # fmt: skip
    of_budgets = (
        "corpus",
        "tensors may take",
        "plan, fastest of three",
        "best single layout",
        "its seconds over",
        "context parallelism's over",
    )
    found = report["summary"]
    said = f"With one factor of three ways: median error {found['median_calibrated']:.1%}, worst {found['worst_calibrated']:.0%}."
    return f"{source(report)} {said}\n\n{lines(head, rows)}\n\n{lines(of_budgets, chosen)}"
