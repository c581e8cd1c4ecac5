"""The tables of what GPUs have measured: steps by layout beside what was foretold, and attention kernels."""

import statistics
from collections.abc import Mapping

from kept import lines, result, size, sources

KERNELS = {"flash": "FlashAttention-2", "cudnn": "cuDNN", "flash, a call for each document": "FlashAttention-2, a call for each document"}
HEADS = "32/8x128"


def reports() -> Mapping[str, Mapping]:
    """What was measured, by GPU."""
    return result("gpu_first_day")["sections"]


def measured_steps() -> str:
    """Seconds and memory of a step, foretold and measured."""
    cells = []
    for name, report in reports().items():
        for row in report["rows"]:
            found, foretold = row.get("measured", {}), row.get("forecast", {})
            if "layout" in row and "seconds" in found:
                own = "device_peak_gib" in foretold
                peaks = f"{foretold['device_peak_gib']:.2f}" if own else "", f"{found['device_peak_gib']:.2f}"
                rate = found.get("flops_per_s", {}).get("causal")
                cells.append((name, step_name(row), f"{foretold['seconds']:.3f}", f"{found['seconds']:.3f}", *peaks, _tera(rate)))
    head = ("GPU", "step", "seconds foretold", "measured", "GiB foretold", "measured", "TFLOP/s")
    return f"{sources(reports())}\n\n{lines(head, cells)}"


def step_name(row: Mapping) -> str:
    """Layout, tokens, and what else a step had."""
    packed = f" in {row['documents']} documents" if "documents" in row else ""
    others = [f"`{key}: {row[key]}`" for key in ("home", "precision") if key in row]
    others += ["factors rounded, not codes"] * ("precision" in row and not row.get("by_codes", True))
    system = row.get("system", "longshift")
    again = " again, beside FSDP2" if system == "longshift" and "system" in row else " compiled" * system.endswith("compiled")
    named = f"`{row['layout']}`{again}" if system.startswith("longshift") else f"torch {system}"
    return ", ".join([f"{named}, {size(row['tokens'])}{packed}", *others])


def attention_kernels() -> str:
    """FLOP/s of attention kernels, causal scores counted once."""
    cells = []
    for name, report in reports().items():
        known: dict[tuple, dict] = {}
        for row in report["rows"]:
            if row.get("heads") == HEADS and row.get("kernel") in KERNELS and "forward_s" in row["measured"]:
                key = row["documents"], row["tokens"], row["forecast"]["forward_s"]  # packs of as many documents differ in their lengths
                known.setdefault(key, {})[row["kernel"]] = row
        for (documents, tokens, _), rows in known.items():
            shown = f"{tokens:,}" if documents == 1 else f"{tokens:,} in {documents}"
            kernels = [kernel for kernel in KERNELS if documents == 1 or kernel != "cudnn"]  # a pack goes to FlashAttention-2
            cells.append((name, shown, *(_both(rows[kernel]) if kernel in kernels else "" for kernel in KERNELS)))
    head = ("GPU", "tokens", *(f"{kernel}: forward, backward" for kernel in KERNELS.values()))
    return lines(head, cells)


def attention_by_length() -> str:
    """FLOP/s of causal attention to one document, by FlashAttention-2 and where cuDNN takes what it can of it."""
    reports, known = result("gpu_kernels")["sections"], {}
    for name, report in reports.items():
        for row in report["rows"]:
            if row["part"] == "attention" and row["causal"] and row["heads"] == HEADS and row["kernel"] in ("flash", "cudnn"):
                known.setdefault((name, row["queries"]), {})[row["kernel"]] = row["measured"]
    width = 32 * 128

    def rates(tokens: int, found: Mapping) -> str:
        return ", ".join(
            f"{work * width * tokens**2 / 2 / found[f'{way}_s'] / 1e12:.0f}" for way, work in (("forward", 4), ("backward", 10))
        )

    def sum_s(found: Mapping) -> float:
        return found["forward_s"] + found["backward_s"]

    cells = [
        (
            gpu,
            f"{tokens:,}",
            *(rates(tokens, rows[name]) for name in ("flash", "cudnn")),
            f"{sum_s(rows['flash']) / sum_s(rows['cudnn']):.2f}",
        )
        for (gpu, tokens), rows in known.items()
    ]
    head = ("GPU", "tokens", "FlashAttention-2: forward, backward", "cuDNN and FlashAttention-2: forward, backward", "times as fast")
    return f"{sources(reports)}\n\n{lines(head, cells)}"


def kernels_of_steps() -> str:
    """Milliseconds of steps and of their kernels by kind."""
    reports, cells = result("gpu_kernels")["sections"], []
    for gpu, report in reports.items():
        for row in report["rows"]:
            if row["part"] == "steps":
                found, kinds = row["measured"], ("matmul", "attention", "update", "other")
                documents = " + ".join(f"{length:,}" for length in row["lengths"])
                said = gpu, f"`{row['layout']}`{', compiled' * row['compile']}", documents, f"`{row['commit'][:7]}`"
                cells.append((*said, *(f"{1e3 * s:.0f}" for s in (found["seconds"], *(found["kernels_s"][kind] for kind in kinds)))))
    head = ("GPU", "layout", "documents", "commit", "step, ms", "matmuls", "attention", "update", "other")
    return f"{sources(reports)}\n\n{lines(head, cells)}"


def chosen_layouts() -> str:
    """Runs with `layout: auto` on a GPU: rates of the trials, and of the steps after them what was predicted."""
    reports, cells = result("gpu_auto")["sections"], []
    for name, report in reports.items():
        begun = max(row["step"] for row in report["rows"] if row.get("first"))  # of the layout that went on: memory is allocated in it
        after = [row for row in report["rows"] if row["step"] > begun]
        said = [row for row in after if "predicted_seconds" in row]
        within = sum(abs(row["seconds"] / row["predicted_seconds"] - 1) <= row["band"] for row in said)
        asked = report["config"]
        tried = ", ".join(f"{rate / 1e12:.0f}" for rate in report["flops_per_s"])
        rate = statistics.median(row["model_flops_per_s"] / 1e12 for row in after)
        bands = sorted(row["band"] for row in said)
        told = f"{within} of {len(said)}", f"{bands[0]:.1%} to {bands[-1]:.1%}"
        cells.append((f"`{name}`", asked["max_len"], asked["tokens_per_step"], tried, f"{rate:.0f}", *told))
    head = ("model", "longest", "tokens a step", "TFLOP/s of the trials", "after them", "within the band", "band")
    return f"{sources(reports)}\n\n{lines(head, cells)}"


def _both(row: Mapping) -> str:
    """TFLOP/s of both directions: the FLOP are those by which the row was foretold."""
    ways = ("forward", "backward")
    return ", ".join(
        f"{row['forecast'][f'{way}_flops_per_s'] * row['forecast'][f'{way}_s'] / row['measured'][f'{way}_s'] / 1e12:.0f}" for way in ways
    )


def _tera(rate: float | None) -> str:
    return f"{rate / 1e12:.0f}" if rate else ""
