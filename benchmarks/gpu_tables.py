"""The tables of what GPUs have measured: steps by layout beside what was foretold, and attention kernels."""

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


def _both(row: Mapping) -> str:
    """TFLOP/s of both directions: the FLOP are those by which the row was foretold."""
    ways = ("forward", "backward")
    return ", ".join(
        f"{row['forecast'][f'{way}_flops_per_s'] * row['forecast'][f'{way}_s'] / row['measured'][f'{way}_s'] / 1e12:.0f}" for way in ways
    )


def _tera(rate: float | None) -> str:
    return f"{rate / 1e12:.0f}" if rate else ""
