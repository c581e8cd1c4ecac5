"""The longest document that trains, rung by rung: the table "How we get here" of the FPDT authors' talk in miniature, on ranks of capped
memory.

    tp                     tensor parallelism         +AC   recompute-full: each block again from its input
    u.z1, u.z2, u.z3       Ulysses with ZeRO          +OC   the inputs wait in the tier
    fpdt, stream           in chunks, keys and values in the tier; the output of attention computed again, or kept

Each rung's document has `--first` tokens, and doubles until a rank is killed for memory, a step takes longer than `--patience`, or
`--most` tokens a rank are reached. Reported are the longest that trained and its tokens a second, those of half of it, and what ended the
search. A rank's memory is what it needs beyond the process that forked it. The vocabulary is 16 times the width, as Llama 3's nearly is, so
logits weigh as they do there.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

from common import arguments, publish, say
from hot_switch import document
from trial import Trial
from worlds import Machine, machine

from longshift.errors import LongshiftError
from longshift.layout.layout import Layout, parse_size
from longshift.layout.legal import faults
from longshift.spec.model import ModelSpec, Rope

LATE = 8.0  # times the patience, after which a step that began is given up


def rungs(ranks: int, chunk: int) -> dict[str, str]:
    """Layouts by name, in the talk's order."""
    chunked = {"fpdt": f"chunk{chunk}.disk.kv-offload.fpdt", "stream": f"chunk{chunk}.disk.kv-offload"}
    if ranks == 1:
        return {"plain": "dp1", "+AC": "recompute-full", "+AC +OC": "recompute-full.disk", **chunked}
    tp = {f"tp{extra}": f"tp{ranks}{words}" for extra, words in _extras()}
    plain = {f"u.z{zero}": f"u{ranks}.z{zero}" for zero in (1, 2, 3)}
    offloaded = {f"u.z{zero} +AC +OC": f"u{ranks}.z{zero}.recompute-full.disk" for zero in (1, 2, 3)}
    return {**tp, **plain, **offloaded, **{name: f"u{ranks}.z3.{words}" for name, words in chunked.items()}}


def _extras() -> tuple[tuple[str, str], ...]:
    return ("", ""), (" +AC", ".recompute-full"), (" +AC +OC", ".recompute-full.disk")


def climb(place: Machine, scratch: Path, spec: ModelSpec, name: str, layout: str, first: int, most: int, patience_s: float) -> dict:
    """One rung: documents of `first` tokens, twice as many, and so on."""
    rates: dict[int, float] = {}
    peaks: dict[int, float] = {}
    tokens, end = first, "most"
    while tokens <= most:
        trial = json.dumps(Trial(spec, (), "bf16", capacity=tokens).to_json())
        told = {"system": "longshift", "groups": ((tokens, layout),), "number": 0, "trial": trial, "per_node": place.per_node}
        try:
            with place.world() as world:
                for what, count in (("warm", min(tokens, 256)), ("one", tokens)):
                    path = scratch / f"{what}-{tokens}.json"
                    path.write_text(json.dumps([[document(count)]]))
                    found = world.call("hot_ranks:update", LATE * patience_s, path=str(path), **told)
        except LongshiftError as fault:  # the kernel says why; a cap counts the page cache too, so its peak does not
            end = "patience" if "no answer" in str(fault) else "memory"
            say(f"{name} at {tokens} tokens: {str(fault)[-120:]}")
            break
        done = {key: max(rank[key] for rank in found) for key in ("seconds", "peak_mib")}
        if place.model is None and 0 < place.memory_bytes < done["peak_mib"] * 2**20:  # nobody is killed for it here
            end = "memory"
            break
        rates[tokens], peaks[tokens] = tokens / done["seconds"], done["peak_mib"]
        say(f"{place.ranks} ranks, {name} {layout}: {tokens} tokens, {rates[tokens]:.0f} tokens/s, {done['peak_mib']:.0f} MiB")
        if done["seconds"] > patience_s:
            end = "patience"
            break
        tokens *= 2
    longest = max(rates, default=0)
    row = {"ranks": place.ranks, "rung": name, "layout": layout, "longest_tokens": longest, "ended_by": end}
    row |= {"tokens_per_s": rates.get(longest), "tokens_per_s_half": rates.get(longest // 2), "peak_mib": peaks.get(longest)}
    return row | {"rates": {str(n): rate for n, rate in rates.items()}}


def compared(rows: list[dict]) -> dict:
    """`stream` against the best rung without chunks, by ranks: how many times longer, and the median ratio of tokens/s at lengths that both
    train."""
    found = {}
    for ranks in sorted({row["ranks"] for row in rows}):
        here = [row for row in rows if row["ranks"] == ranks and row["longest_tokens"]]
        whole = [row for row in here if row["rung"] not in ("fpdt", "stream")]
        stream = next((row for row in here if row["rung"] == "stream"), None)
        if not whole or stream is None:
            continue
        longest = max(row["longest_tokens"] for row in whole)
        best = max((row for row in whole if row["longest_tokens"] == longest), key=lambda row: row["tokens_per_s"])
        ratios = [stream["rates"][n] / rate for n, rate in best["rates"].items() if n in stream["rates"]]
        found[str(ranks)] = {
            "best": best["rung"],
            "times_longer": stream["longest_tokens"] / longest,
            "stream_ended_by": stream["ended_by"],
        }
        found[str(ranks)]["tokens_per_s_ratio"] = statistics.median(ratios) if ratios else None
    return found


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--rungs", nargs="*", help="only these")
    parser.add_argument("--memory", default="1G", help="of a rank")
    parser.add_argument("--cpu", default="0.5", help="cores of a rank, on the scale model")
    parser.add_argument("--plain", action="store_true", help="this machine as it is: ranks are not slowed, and not killed but measured")
    parser.add_argument("--chunk", default="1K")
    parser.add_argument("--first", default="1K", help="tokens of the shortest document tried")
    parser.add_argument("--most", default="64K", help="tokens of the longest document tried on one rank; times the ranks on more")
    parser.add_argument("--patience", type=float, default=150.0, help="seconds of a step after which no longer document is tried")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.most, options.width, options.layers = [1, 2], "2K", 64, 1
    heads = max(4, options.width // 64)
    width, ffn = options.width, options.width * 11 // 4
    rows = []
    for ranks in options.ranks:
        most = parse_size(options.most) * ranks
        spec = ModelSpec("llama", 16 * width, width, options.layers, heads, heads // 2, width // heads, ffn, most, rope=Rope())
        size = f"ranks={ranks}" if options.plain or ranks == 1 else f"nodes={max(1, ranks // 2)},per_node={min(ranks, 2)},cpu={options.cpu}"
        if not options.plain and ranks == 1:
            size = f"nodes=1,per_node=1,cpu={options.cpu}"
        size += f",memory={options.memory}" + ("" if options.plain else ",like=a800,shrink=8,rate=290G")
        with machine(size) as place, tempfile.TemporaryDirectory(prefix="longshift-") as scratch:
            for name, layout in rungs(ranks, parse_size(options.chunk)).items():
                if name in (options.rungs or [name]) and not faults(spec, Layout.parse(layout), ranks):
                    rows.append(climb(place, Path(scratch), spec, name, layout, parse_size(options.first), most, options.patience))
    model = {"width": width, "layers": options.layers, "heads": heads, "kv_heads": heads // 2, "ffn": ffn, "vocab": 16 * width}
    publish("long_ladder", {"model": model, "memory": options.memory, "cpu": options.cpu, "compared": compared(rows)}, rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
