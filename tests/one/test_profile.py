"""`longshift profile`: what runs here is measured for real, on sizes that take seconds."""

import io
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from longshift import cli
from longshift.cluster import files
from longshift.cluster.cluster import Cluster, Heads
from longshift.cluster.curves import Curve, SampledSizes
from longshift.cluster.host import core_count
from longshift.dist.fork import ForkedWorld
from longshift.dist.world import World
from longshift.errors import UsageError
from longshift.model import kernels
from longshift.model.chosen_kernel import probe
from longshift.profile import bench, run, time_attention, time_compute, time_copies, time_links
from longshift.profile.bench import FEWEST, MOST, Bench, CurveSpec, curve_of
from longshift.profile.report import FAMILIES, rate, show
from longshift.reports.plan_page import write_profile
from longshift.terminal import short_number

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def told() -> list[str]:
    return []


@pytest.fixture(scope="module")
def here(home, told) -> Iterator[Cluster]:
    """This machine, measured on few and small sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time_compute, "SHAPES", {("cpu", True): ((8, 64), (64, 128))})
        patch.setattr(time_compute, "STREAMED", {("cpu", True): (2**12, 2**16)})
        patch.setattr(time_compute, "SPIN_S", 0.05)
        patch.setattr(time_attention, "TOKENS", {("cpu", True): ((64, 128), (64,))})
        patch.setattr(time_copies, "SIZES", {True: (2**12, 2**16)})
        patch.setattr(time_links, "LARGEST_BYTES", 2**16)
        patch.setattr(time_copies, "FILE_BYTES", 2**21)
        patch.setattr(time_copies, "BLOCKS", {True: (2**16, 2**18)})
        patch.setattr(run, "LONG_S", run.SHORT_S)
        patch.setattr(run, "BUDGETS_S", dict.fromkeys(run.BUDGETS_S, (0.0,)))
        yield run.obtain(World.alone(), 1, True, False, told.append, home / ".cache/longshift")


def test_everything_that_planning_needs_is_measured(here):
    words = {name.split()[0] for name in here.curves}
    assert words >= {"matmul", "elementwise", "launch", "attention", "copy", "disk"}
    if core_count() > 1:
        assert words >= {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"}
        assert here.links["node"].bytes_per_s > 1e6
    heads = Heads(8, 2, 64)
    assert here.knows_attention("float32", "flash")
    assert 0 < here.attention_s(64, 64, heads, "bf16", "forward") < 1
    assert here.matmul_s(64, 128, 128, "float32") > here.matmul_s(8, 64, 64, "float32")
    assert here.disk_s("read", 2**16) > 0
    assert 0 < here.device.cores < core_count() + 0.5
    assert set(here.sources.values()) == {"longshift profile"}


def test_the_cached_profile_is_used_again(here, home, told):
    cache, before = home / ".cache/longshift", len(told)
    assert len(list((cache / "profiles").iterdir())) == 1  # and no scratch file of the disk's
    assert run.obtain(World.alone(), 1, True, False, told.append, cache) == here
    assert told[before:] == [f"measured before; kept in {run.cache_file(here.facts, cache)}"]


def test_another_machine_or_a_fuller_profile_is_measured_anew(here, home, told):
    cache = home / ".cache/longshift"
    alone = World.alone()
    assert run.kept(alone.device, 1, 1, True, cache, told.append) == here
    assert run.kept(alone.device, 1, 1, False, cache, told.append) is None
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert run.kept(alone.device, 1, 1, True, cache, told.append) is None
    finally:
        torch.set_num_threads(threads)


def test_a_full_profile_serves_for_a_quick_one(here, tmp_path):
    full = replace(here, facts=here.facts | {"measured": "full"})
    files.save(full, run.cache_file(full.facts, tmp_path))
    assert run.kept(World.alone().device, 1, 1, True, tmp_path, print) == full


def test_a_damaged_cache_is_told_and_passed_over(here, tmp_path):
    file, told = run.cache_file(here.facts, tmp_path), []
    files.save(here, file)
    file.write_text(file.read_text()[:-100])
    assert run.kept(World.alone().device, 1, 1, True, tmp_path, told.append) is None
    assert len(told) == 1
    assert "is damaged" in told[0]


def test_facts_tell_nothing_about_person_or_place():
    facts = run.facts(CPU, 2, 4, True)
    about = {"measured", "device", "cpu", "cores", "core_quota", "memory_gib", "system", "torch", "threads", "nodes", "devices_per_node"}
    assert set(facts) == about
    assert json.loads(json.dumps(facts)) == facts
    assert run.facts(CPU, 2, 4, True) == facts != run.facts(CPU, 2, 4, False)


def test_a_gpus_profile_is_found_whatever_threads_a_process_has(monkeypatch):
    """Ranks that measure share the cores; who looks for the profile has them all."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(run, "driver", lambda: "1")
    own = [run.facts(torch.device(kind), 1, 2, False) for kind in ("cuda", "cpu")]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 97)
    now = [run.facts(torch.device(kind), 1, 2, False) for kind in ("cuda", "cpu")]
    assert now[0] == own[0]
    assert now[1] != own[1]


def test_medians_of_interleaved_rounds():
    calls: list[str] = []

    def timed(name: str, seconds: float) -> float:
        calls.append(name)
        return seconds

    one = Bench(CPU, True)
    samples = one.seconds([lambda: timed("a", 0.01), lambda: timed("b", 0.02)], budget_s=0.0)
    assert samples == [[0.01] * FEWEST, [0.02] * FEWEST]
    assert calls[4:] == ["a", "b"] * FEWEST  # after warming each
    assert len(one.seconds([lambda: timed("a", 0.01)], budget_s=60.0)[0]) == MOST
    curve = curve_of((SampledSizes("bytes", (1, 2, 3)),), [[1.0, 9.0, 2.0], [8.0, 8.0, 8.0], [2.0, 2.0, 2.0]])
    assert curve.seconds == pytest.approx((2.0, 4.0, 4.0))  # 8 then 2 cannot both be: the middle of both
    assert curve.spread == pytest.approx((2.0, 0.0, 0.0))


def test_a_family_has_fewer_rounds_where_three_would_take_too_long(monkeypatch):
    """Operations of 4 s: two rounds of one are expected to take 8 s, three to take 12 s; of two operations one round is all."""
    passed_s = [0.0]

    def run() -> None:
        passed_s[0] += 4.0

    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: passed_s[0]))
    assert [len(samples) for samples in Bench(CPU, True).seconds([run], budget_s=1.0)] == [2]
    assert [len(samples) for samples in Bench(CPU, True).seconds([run, run], budget_s=1.0)] == [1, 1]
    assert [len(samples) for samples in Bench(CPU, False).seconds([run], budget_s=40.0)] == [9]


def test_a_profile_says_how_long_it_takes_and_how_far_it_is(here, told):
    said = "\n".join(told)
    assert re.search(r"^measuring for about \d+ s(, up to two minutes while others run)?$", said, re.MULTILINE)
    assert re.findall(r"^(\d) of 5, after \d+ s: ", said, re.MULTILINE) == ["1", "2", "3", "4", "5"]


def test_a_starved_machine_is_measured_at_few_sizes(monkeypatch, tmp_path):
    """A process that gets a fifth of its cores says so, and measures what --quick would."""
    told: list[str] = []
    monkeypatch.setattr(time_compute, "granted_cores", lambda: 0.2 * torch.get_num_threads())
    monkeypatch.setattr(run, "core_quota", lambda: torch.get_num_threads())

    def measured(world: World, per_node: int, quick: bool, budget_s: float, least_s: float) -> dict:
        raise UsageError(f"quick {quick}")

    monkeypatch.setattr(run, "_collectives", measured)
    with pytest.raises(UsageError, match="quick True"):
        run.profile(World.alone(), 1, False, told.append, tmp_path)
    assert any(line.startswith("as with --quick") for line in told)


def test_short_operations_are_repeated_inside_one_timing(monkeypatch):
    passed_s, calls = [0.0], []

    def run() -> None:
        calls.append(1)
        passed_s[0] += 2**-20

    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: passed_s[0]))
    one = Bench(CPU, True)
    curve = one.curves({"x": CurveSpec((SampledSizes("n", (1,)),), lambda n: run)}, 0.0)["x"]
    assert len(calls) == 2 + FEWEST * math.ceil(one.least_s * 2**20)  # to warm, to see how long it takes, and the rounds
    assert len(calls) > 1000
    assert curve.seconds[0] == pytest.approx(2**-20)


def test_kernels_of_this_machine():
    found = {
        (k.name, name): probe(k, dtype, name, CPU) for name, dtype in time_compute.DTYPES.items() for k in time_attention.tried(CPU, dtype)
    }
    assert found["tiled", "bf16"].legal
    assert found["tiled", "bf16"].backward_error < found["flash", "bf16"].backward_error
    assert found["flash", "float32"].legal
    assert found["flash", "bf16"].legal
    assert found["flash", "float32"].forward_error < 1e-6 < found["flash", "bf16"].forward_error < 1e-2
    assert "cudnn" in found["cudnn", "bf16"].why_not
    assert not found["cudnn", "bf16"].legal


def test_a_kernel_that_forgets_the_global_log_sum_exp_is_not_legal():
    good = kernels.FLASH

    def forgetful(grad, q, k, v, out, lse, causal, scale):
        return good.backward(grad, q, k, v, *good.forward(q, k, v, causal, scale), causal, scale)

    def base_two(q, k, v, causal, scale):
        out, lse = good.forward(q, k, v, causal, scale)
        return out, lse * 1.4427

    def doubled(q, k, v, causal, scale):
        out, lse = good.forward(q, k, v, causal, scale)
        return 2 * out, lse

    verdicts = [
        probe(replace(good, **change), torch.float32, "float32", CPU)
        for change in ({}, {"backward": forgetful}, {"forward": base_two}, {"forward": doubled})
    ]
    assert [verdict.legal for verdict in verdicts] == [True, False, False, False]
    assert verdicts[1].lse
    assert not verdicts[1].global_lse
    assert "wrong" in verdicts[2].why_not or not verdicts[2].lse
    assert "wrong" in verdicts[3].why_not


def test_a_link_is_what_its_messages_took():
    seconds = tuple(1e-4 + size / 1e8 for size in (1e3, 1e6, 1e7))
    link = time_links.link_of(Curve((SampledSizes("ranks", (2,)), SampledSizes("bytes", (1e3, 1e6, 1e7))), seconds))
    assert link.bytes_per_s == pytest.approx(1e8)
    assert link.latency_s == pytest.approx(1.1e-4)


def test_ranks_of_nodes_are_grouped_by_level(monkeypatch):
    monkeypatch.setattr(time_links, "LARGEST_BYTES", 2**16)
    with ForkedWorld(4) as world:
        answers = world.call("longshift.profile.time_links:collectives", 60.0, per_node=2, quick=True, budget_s=0.0, least_s=0.0)
    assert answers[0] == answers[1] == answers[2] == answers[3]
    levels = {"node": 2, "network": 2, "network by 2": 4}
    wanted = {f"{operation} {level}": ranks for operation in time_links.OPERATIONS for level, ranks in levels.items()}
    del wanted["send network by 2"]
    assert set(answers[0]) == {*wanted, "cores send", "late"}
    made = files.decode_curves(answers[0])
    for name, ranks in wanted.items():
        assert made[name].axes[0].sizes == (ranks,)
        assert made[name].axes[1].sizes[-1] >= 2**16
    late = made["late"]
    assert late.axes[0].sizes == (2, 4)
    assert late.seconds[1] / late.seconds[0] == pytest.approx((4 / 5 - 1 / 2) / (2 / 3 - 1 / 2))


def test_ranks_agree_on_the_median(here):
    slow = {name: curve.slower(3.0) for name, curve in here.curves.items() if "disk" not in name}
    merged = run.medians([dict(here.curves), slow, slow])
    assert merged["matmul bf16"].seconds == slow["matmul bf16"].seconds
    assert merged["disk read plain depth1"] == here.curves["disk read plain depth1"]
    middle = run.medians([dict(here.curves), slow])["matmul bf16"].seconds
    assert middle == pytest.approx([2 * seconds for seconds in here.curves["matmul bf16"].seconds])


def test_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(time_copies, "FILE_BYTES", 2**20)
    monkeypatch.setattr(time_copies, "BLOCKS", {True: (2**16,)})
    curves = time_copies.disk(Bench(CPU, True), tmp_path, 0.0)
    assert set(curves) == {"disk read plain depth1", "disk write plain depth1"}
    assert list(tmp_path.iterdir()) == []


def test_tables_hold_every_measured_point(here):
    text = io.StringIO()
    show(here, Console(file=text, width=200))
    shown = text.getvalue()
    for name in here.curves:
        assert name == "launch" or name in shown, name
    assert "not here: " in shown
    assert "[m, k] @ [k, n]" in shown


def test_rates():
    assert rate("matmul bf16", (2, 3, 4), 2.0) == (24.0, "FLOP/s")
    assert rate("attention flash bf16 forward causal 8/2x64", (4,), 1.0) == (4 * 4 * 4 * 8 * 64 / 2, "FLOP/s")
    assert rate("all_gather node", (2, 100), 4.0) == (25.0, "B/s")
    assert [short_number(value) for value in (0.5, 999, 999.6, 1234, 5.678e10)] == ["0.5 ", "999 ", "1 k", "1.23 k", "56.8 G"]


def test_charts_in_one_file(here, tmp_path):
    write_profile(here, tmp_path / "plots.html")
    page = (tmp_path / "plots.html").read_text()
    titles = {"Matmul", "Elementwise", "Copies", "Disk", "Attention forward, 8/2x64 heads", "Attention backward, 8/2x64 heads"}
    found = re.findall("<h2>(.*?)</h2>", page)
    assert titles <= set(found)
    drawn = [json.loads(text) for text in re.findall('class="chart">(.*?)</script>', page)]
    assert all(len({series["name"] for series in chart["series"]}) == len(chart["series"]) for chart in drawn)
    charts = dict(zip(found[-len(drawn) :], drawn))
    assert all(chart["y"] == ("FLOP/s" if title.startswith(("Matmul", "Attention")) else "bytes/s") for title, chart in charts.items())
    assert "bf16" in {series["name"] for series in charts["Matmul"]["series"]}
    assert any("host" in series["name"] for series in charts["Copies"]["series"])
    assert sum(len(chart["series"]) for chart in drawn) == sum(name.split()[0] in dict(FAMILIES) for name in here.curves)


def test_the_command(here, home, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(home))

    def command(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["longshift", "profile", "--quick", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        return capsys.readouterr().out

    assert json.loads(command("--json", "-o", str(tmp_path / "here.json"), "--html", str(tmp_path / "here.html"))) == files.encode(here)
    assert files.load(tmp_path / "here.json") == here
    assert (tmp_path / "here.html").stat().st_size > 10_000
    assert "attention kernel" in command()
