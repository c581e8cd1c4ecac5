"""What the benchmarks found, in a few sentences with a number each, from the results that are kept."""

import math
from collections.abc import Callable, Iterable, Mapping

from kept import CHUNKED, K, result


def bullets(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def headline() -> str:
    """Why to use Longshift: three reasons, with a measured number each."""
    gain = max(result("plan_choice_2x2")["summary"]["auto_over_best_static_by_corpus"].values())
    parity = result("parity")["sections"].values()
    layouts = len({row["layout"] for report in parity for row in report["rows"]})
    worst = math.ceil(max(report["summary"]["worst"] for report in parity) * 1e14) / 1e14
    return bullets(
        (
            f"**Long documents fit.** Streamed in chunks, a document can be {times_as_long()} times as long in the same memory as in one "
            "piece.",
            f"**Short documents stay fast.** Layouts by length are up to {gain:.2f} times as fast as the best single layout that fits.",
            f"**The result stays the same.** {layouts} layouts and switches differ from one process by at most {worst:.1e}, in float64.",
        )
    )


def times_as_long() -> int:
    """The longest document in chunks over the longest in one piece, on the number of ranks where that is least."""
    sections = result("long_ladder")["sections"]
    rows = [row for name, report in sections.items() if name.startswith("300 MiB") for row in report["rows"]]

    def longest(ranks: int, chunked: bool) -> int:
        return max(row["longest_tokens"] for row in rows if row["ranks"] == ranks and (row["rung"] in CHUNKED) == chunked)

    return min(longest(ranks, True) // longest(ranks, False) for ranks in {row["ranks"] for row in rows})


def conclusions() -> str:
    """What the benchmarks found, a number each."""
    peers = [ratio for row in result("static")["summary"]["ratio_to_best_peer"].values() for ratio in row.values()]
    peaks = [row["ratio"] for row in result("ledger")["rows"]]
    return bullets(
        (
            f"**Speed.** Single layouts run at {min(peers):.2f} to {max(peers):.2f} times the speed of the fastest peer, on two CPU ranks.",
            f"**Predicted memory.** Recorded peaks are {min(peaks):.3f} to {max(peaks):.3f} of the predicted ones.",
            f"**Predicted time.** {predicted_steps():,} published steps of other trainers are off by {result('published')['mean_raw']:.1%} "
            "on average.",
        )
    )


def predicted_steps() -> int:
    """How many published steps were predicted."""
    return sum(found["raw"]["rows"] for found in result("published")["by_source"].values())


def planning() -> str:
    """How far predicted seconds are off, and what a planner loses by that."""
    published, nodes = result("published"), result("plan_choice_2x2")["summary"]
    return bullets(
        (
            f"{predicted_steps():,} published steps of other trainers are off by {published['mean_raw']:.1%} on average. The layout that "
            f"comes first takes {published['regret_first']:.1%} longer than the best.",
            f"Steps of Longshift on four CPU ranks of two simulated nodes are off by {nodes['median_raw']:.1%} in the median, "
            f"and by {nodes['worst_calibrated']:.0%} at most after calibration.",
        )
    )


def one_gpu() -> str:
    """Steps of an H200 beside torch FSDP2, and beside the prediction of their memory."""
    rows = [row for row in result("gpu_first_day", "H200, later")["rows"] if row["part"] == "rivals"]
    steps = {(row["system"], row["layout"]): row for row in rows}

    def seconds(system: str, layout: str = "dp1") -> str:
        return f"{steps[system, layout]['measured']['seconds']:.3f} s"

    plain = steps["longshift", "dp1"]
    peak, forecast = (plain[which]["device_peak_gib"] for which in ("measured", "forecast"))
    return bullets(
        (
            f"A step of 8K tokens takes {seconds('longshift')} on an H200, with torch FSDP2 {seconds('fsdp2')}; compiled, "
            f"{seconds('longshift compiled')} and {seconds('fsdp2 compiled')}.",
            f"With gradient checkpointing it takes {seconds('longshift', 'recompute-full')}, with FSDP2 "
            f"{seconds('fsdp2 checkpoint', 'recompute-full')}.",
            f"Its peak is {peak:.2f} GiB of device memory; {forecast:.2f} GiB were predicted.",
        )
    )


def hot_switching() -> str:
    """Hot switching over the best single layout, at the best budget of memory of each benchmark."""
    names = {
        "2 nodes of 2 ranks, python": "Two nodes of two ranks, Python's sources",
        "2 nodes of 2 ranks, text": "Two nodes of two ranks, Wikipedia's lengths",
        "2 nodes of 4 ranks, text": "Two nodes of four ranks, Wikipedia's lengths",
    }

    def best(section: str) -> float:
        (budgets,) = result("hot_switch", section)["summary"]["compared"].values()
        return max(budget["static_all"]["ratio"] for budget in budgets if budget["hot"] and budget["static_all"])

    return bullets(
        f"{name}: {best(section):.2f} times the speed of the best single layout, at the best budget." for section, name in names.items()
    )


def long_documents() -> str:
    """Chunks beside gradient checkpointing: length, speed and memory."""
    rows = {(row["method"], row["tokens"]): row for row in result("long_context", "by length")["rows"]}
    lengths = sorted({tokens for _, tokens in rows})

    def speedups(method: str) -> str:
        ratios = [rows["stream", n]["tokens_per_s"] / rows[method, n]["tokens_per_s"] for n in lengths]
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    chunked, whole = rows["stream", 64 * K]["peak_mib"], rows["recompute", 64 * K]["peak_mib"]
    return bullets(
        (
            f"In the same memory a document can be {times_as_long()} times as long in chunks as in one piece, on one, two and four ranks.",
            f"Chunks are {speedups('recompute')} times as fast as gradient checkpointing that computes attention again, and "
            f"{speedups('selective')} times as fast as torch's selective checkpointing.",
            f"A document of 64K tokens takes {chunked:.0f} MiB in chunks, and {whole:.0f} MiB with gradient checkpointing.",
        )
    )


def training_state() -> str:
    """Steps with the training state off the device, beside those with it there and beside DeepSpeed."""
    rows = {(row["home"], row["tokens"]): row["step_s"] for row in result("state_tiers")["rows"] if row["part"] == "speed"}
    lengths = sorted({tokens for _, tokens in rows})
    peer = result("static_offload")["summary"]["ratio_to_best_peer"]["dp2.z2,host"]
    disk = {tokens: f"{rows['disk', tokens] / rows['device', tokens]:.2f} times as long" for tokens in lengths}
    return bullets(
        (
            f"With `home: host` Longshift is {peer['float32']:.2f} times as fast as DeepSpeed's ZeRO-Offload in float32, and "
            f"{peer['bf16']:.2f} times in bf16.",
            f"With the state on a disk of 200 MB/s, a step of {lengths[0]:,} tokens takes {disk[lengths[0]]} as with it on the device.",
            f"A step of {lengths[-1]:,} tokens has more computing to hide the disk under, and takes {disk[lengths[-1]]}.",
        )
    )


def plans() -> str:
    """What plans win over single layouts on CPU ranks, and how far published steps are off."""
    found = {case: result(f"plan_choice_{case}")["summary"]["auto_over_best_static_by_corpus"].values() for case in ("2x2", "2x4")}
    four, eight = (f"{min(gains):.2f} to {max(gains):.2f}" for gains in found.values())
    worst = min(result(f"plan_choice_{case}")["summary"]["auto_over_best_static"] for case in found)
    return bullets(
        (
            f"At the best budget of each corpus, a plan is {four} times as fast as the best single layout on four CPU ranks, and "
            f"{eight} times on eight.",
            f"At the worst budget of these, it is {worst:.2f} times as fast.",
            f"Predictions of published steps are off by {result('published')['mean_raw']:.1%} on average.",
        )
    )


TABLES: Mapping[str, Callable[[], str]] = {
    "headline": headline,
    "conclusions": conclusions,
    "planning-summary": planning,
    "plans-summary": plans,
    "training-state-summary": training_state,
    "one-gpu-summary": one_gpu,
    "hot-switching-summary": hot_switching,
    "long-documents-summary": long_documents,
}
