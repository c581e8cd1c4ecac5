"""What is known of machines: curves that cannot mislead, files that cannot be mistaken, presets that name their sources."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshift.cluster import files, network
from longshift.cluster.cluster import Backend, Cluster, Device, Heads, Link
from longshift.cluster.curves import Curve, SampledSizes, monotone
from longshift.errors import UsageError

SIZES = st.lists(st.floats(1, 1e9), min_size=1, max_size=4, unique_by=lambda x: round(np.log(x), 2)).map(lambda sizes: tuple(sorted(sizes)))


@st.composite
def curves(draw) -> Curve:
    """One to three axes, seconds that grow along each, by chance not at all."""
    axes = tuple(SampledSizes(f"axis{n}", draw(SIZES), draw(st.sampled_from((0.0, 1.0, 2.0)))) for n in range(draw(st.integers(1, 3))))
    count = int(np.prod([len(axis.sizes) for axis in axes]))
    steps = draw(st.lists(st.sampled_from((0.0, 1e-6, 0.3, 7.0)), min_size=count, max_size=count))
    grid = 1e-7 + np.array(steps).reshape([len(axis.sizes) for axis in axes])
    for dim in range(len(axes)):
        grid = np.cumsum(grid, axis=dim)
    return Curve(axes, tuple(grid.ravel()))


@st.composite
def asked(draw) -> tuple[Curve, tuple[float, ...]]:
    """A curve and sizes in and around its range."""
    curve = draw(curves())
    return curve, tuple(draw(st.floats(axis.sizes[0] / 50, axis.sizes[-1] * 50)) for axis in curve.axes)


@given(curves())
def test_a_curve_is_exact_at_its_points(curve):
    found = [float(curve(*point)) for point in curve.points]
    np.testing.assert_allclose(found, curve.seconds, rtol=1e-12)


@given(asked(), st.data())
def test_more_work_is_never_faster_and_nothing_is_free(question, data):
    curve, sizes = question
    axis = data.draw(st.integers(0, len(sizes) - 1))
    more = tuple(size * (data.draw(st.floats(1, 100)) if n == axis else 1) for n, size in enumerate(sizes))
    less_s, more_s = float(curve(*sizes)), float(curve(*more))
    assert 0 < less_s <= more_s * (1 + 1e-12)


@given(asked())
def test_between_the_points_a_curve_stays_between_their_seconds(question):
    curve, sizes = question
    inside = tuple(min(max(size, axis.sizes[0]), axis.sizes[-1]) for size, axis in zip(sizes, curve.axes))
    assert min(curve.seconds) * (1 - 1e-12) <= curve(*inside) <= max(curve.seconds) * (1 + 1e-12)


def test_beyond_the_points_seconds_grow_with_the_work_and_have_a_floor():
    curve = Curve((SampledSizes("tokens", (1024, 4096), 2.0),), (1e-3, 1.2e-2))
    assert curve(8192) == pytest.approx(4.8e-2)
    assert curve(1) == pytest.approx(1e-3)
    assert curve(2048) == pytest.approx(np.sqrt(1e-3 * 1.2e-2))


@given(asked())
def test_arrays_give_what_numbers_give(question):
    curve, sizes = question
    one = curve(*sizes)
    for kind in (float, np.float64, np.asarray, lambda size: np.full((2, 3), size)):
        np.testing.assert_allclose(curve(*map(kind, sizes)), one, rtol=1e-12)
    assert curve(*(np.zeros(0) for _ in sizes)).shape == (0,)


@pytest.mark.parametrize(
    ("axes", "seconds", "reason"),
    [
        ([("bytes", (1, 2))], (1.0,), "2 points, but 1 seconds"),
        ([("bytes", (1, 2))], (1.0, 0.5), "seconds fall as a size grows"),
        ([("m", (1, 2)), ("n", (1, 2))], (1.0, 2.0, 0.9, 3.0), "seconds fall"),
        ([("bytes", (1, 2))], (0.0, 1.0), "finite and positive"),
        ([("bytes", (1, 2))], (-1.0, 1.0), "finite and positive"),
        ([("bytes", (1, 2))], (1.0, float("nan")), "finite and positive"),
        ([("bytes", (2, 1))], (1.0, 2.0), "ascending"),
        ([("bytes", (0, 1))], (1.0, 2.0), "positive"),
        ([("bytes", ())], (), "positive and ascending"),
    ],
)
def test_what_no_clock_can_show_is_no_curve(axes, seconds, reason):
    with pytest.raises(UsageError, match=reason):
        Curve(tuple(SampledSizes(*axis) for axis in axes), seconds)


@given(st.integers(1, 3).flatmap(lambda dims: st.lists(st.floats(1e-6, 1e3), min_size=4**dims, max_size=4**dims)))
def test_monotone_makes_grids_grow_and_leaves_those_alone_that_do(values):
    grid = np.array(values).reshape([4] * round(np.log(len(values)) / np.log(4)))
    made = monotone(grid)
    assert all(np.all(np.diff(made, axis=dim) >= 0) for dim in range(made.ndim))
    np.testing.assert_array_equal(monotone(made), made)
    assert grid.min() <= made.min()
    assert made.max() <= grid.max()


def machine() -> Cluster:
    """Two nodes of two CPUs, with a curve of each kind that questions are answered from."""
    line = (SampledSizes("bytes", (2**10, 2**20)),)
    attention = {
        f"attention {name} bf16 {direction} {kind} {heads}": Curve(axes, tuple(rate * s for s in seconds))
        for name, rate in (("flash", 1.0), ("math", 3.0), ("flex", 0.1))
        for direction in ("forward", "backward")
        for kind, axes, seconds in (
            ("causal", (SampledSizes("tokens", (256, 1024), 2.0),), (1e-3, 1e-2)),
            ("full", (SampledSizes("queries", (256, 1024)), SampledSizes("keys", (256, 1024))), (2e-3, 8e-3, 8e-3, 3e-2)),
        )
        for heads in ("8/2x64", "32/8x128")
    }
    shape = tuple(SampledSizes(name, (64, 256)) for name in "mkn")
    return Cluster(
        name="small",
        origin="measured",
        nodes=2,
        devices_per_node=2,
        device=Device("cpu", "cpu", 2e9, 1e10, {"bf16": 1e11, "float32": 5e10}, 1e-6, cores=1.0),
        host_bytes=8e9,
        links={"node": Link(1e9, 1e-4), "network": Link(1e8, 2e-4)},
        shares=dict.fromkeys(files.SHARES, 1.0),
        sources={},
        curves={
            "matmul bf16": Curve(shape, tuple(1e-6 * (1 + m) * (1 + k) * (1 + n) for m in (0, 1) for k in (0, 1) for n in (0, 1))),
            "elementwise bf16": Curve(line, (1e-6, 1e-4)),
            "all_gather node": Curve((SampledSizes("ranks", (2,), 0.0), *line), (1e-4, 1e-3)),
            "copy to_host pinned": Curve(line, (1e-5, 1e-3)),
            "disk read plain depth1": Curve(line, (1e-5, 1e-3)),
            **attention,
        },
        backends=(
            Backend("flash", "bf16", "", True, True, 2e-3, 5e-3),
            Backend("math", "bf16", "", True, True, 1e-2, 1e-2),
            Backend("flex", "bf16", "", True, False, 2e-3, 5e-3),
            Backend("cudnn", "bf16", "no kernel"),
        ),
        facts={"torch": "2.13", "threads": 1},
    )


def sourced() -> Cluster:
    small = machine()
    return replace(small, sources=dict.fromkeys(files.constants(small), "test"))


def test_questions_are_answered_from_curves():
    small = machine()
    heads = Heads(8, 2, 64)
    assert small.matmul_s(64, 256, 64, "bf16") == pytest.approx(2e-6)
    assert small.elementwise_s(2**20, "bf16") == pytest.approx(1e-4)
    assert network.collective_s(small, "all_gather", 2**20, 2, 2) == pytest.approx(1e-3)
    assert network.collective_s(small, "all_gather", 2**20, 1, 2) == 0
    assert small.copy_s("to_host pinned", 2**10) == pytest.approx(1e-5)
    assert small.disk_s("read", 2**10) == pytest.approx(1e-5)
    assert small.attention_s(256, 256, heads, "bf16", "forward", causal=True) == pytest.approx(1e-3)
    assert small.attention_s(256, 1024, heads, "bf16", "backward") == pytest.approx(8e-3)
    assert small.attention_s(256, 256, heads, "bf16", "forward", causal=True, backend="math") == pytest.approx(3e-3)


def test_the_best_kernel_takes_a_global_log_sum_exp():
    """flex is ten times faster, and not legal."""
    heads = Heads(8, 2, 64)
    assert machine().attention_s(256, 256, heads, "bf16", "forward", causal=True) == pytest.approx(1e-3)
    without = machine().attention_s(256, 256, heads, "bf16", "forward", causal=True, without="flash")
    assert without == pytest.approx(3e-3)
    assert machine().knows_attention("bf16", "math")
    assert not machine().knows_attention("bf16", "flex")
    assert not machine().knows_attention("float32")


def test_heads_that_were_not_measured_are_scaled():
    assert machine().attention_s(256, 256, Heads(16, 4, 128), "bf16", "forward", causal=True) == pytest.approx(0.5e-3)


def test_what_is_not_known_is_said():
    small = machine()
    for question in (
        lambda: small.disk_s("write", 2**10),
        lambda: small.copy_s("to_device pinned", 2**10),
        lambda: small.elementwise_s(1, "fp16"),
        lambda: small.attention_s(256, 256, Heads(8, 2, 64), "bf16", "forward", backend="cudnn"),
    ):
        with pytest.raises(UsageError, match=r"nothing is known of .* on small .*longshift profile"):
            question()


def test_constants_answer_where_nothing_was_measured():
    h100 = files.preset("h100")
    ring_s = 2 * 7 / 8 * 1e9 / (450e9 * 0.817)
    assert network.collective_s(h100, "all_reduce", 1e9, 8, 8) == pytest.approx(network.BEGIN_S + 14 * 3.4e-6 + ring_s)
    assert h100.copy_s("to_device pinned", 64e9) == pytest.approx(1 / 0.856, rel=1e-4)


@pytest.mark.parametrize(("dtype", "stand_in", "slower"), [("float64", "float32", 2.0), ("fp16", "bf16", 1.0), ("bf16", "float32", 1.0)])
def test_formats_that_were_not_measured_take_the_rates_of_others(dtype, stand_in, slower):
    """Arithmetic by the named factor; bytes take as long in any format."""
    cpu = files.preset("cpu")
    kept = {stand_in: cpu.device.flops_per_s["float32"]}
    curves = {name: curve for name, curve in cpu.curves.items() if dtype not in name.split()}
    machine = replace(cpu, device=replace(cpu.device, flops_per_s=kept), curves=curves).with_arithmetic(dtype)
    both = [float(machine.matmul_s(256, 512, 128, name)) for name in (dtype, stand_in)]
    assert both[0] == pytest.approx(slower * both[1], rel=0.01)
    assert float(machine.elementwise_s(1 << 20, dtype)) == float(machine.elementwise_s(1 << 20, stand_in))
    assert machine.with_arithmetic(dtype) is machine
    assert replace(cpu, device=replace(cpu.device, flops_per_s=kept)).with_arithmetic(stand_in).device.flops_per_s == kept


def test_a_machine_without_any_rate_is_refused():
    cpu = files.preset("cpu")
    with pytest.raises(UsageError, match="arithmetic in float32"):
        replace(cpu, device=replace(cpu.device, flops_per_s={"bf16": 1e12})).with_arithmetic("float32")


def test_a_file_gives_back_what_was_saved(tmp_path):
    small, file = sourced(), tmp_path / "deep" / "small.json"
    files.save(small, file)
    assert files.load(file) == small
    assert files.cluster(str(file)) == small
    assert [path.name for path in file.parent.iterdir()] == ["small.json"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text[: len(text) // 2], "is damaged: not JSON"),
        (lambda text: text.replace("0.001,", "0.0011,"), "damaged or was edited: its SHA-256 differs"),
        (lambda text: text.replace('"longshift cluster"', '"another"'), "is not a profile"),
        (lambda text: "[1, 2]", "is not a profile"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "has version 2, and this Longshift reads 1"),
        (lambda text: "", "is damaged: not JSON"),
    ],
)
def test_damaged_and_foreign_files_are_refused(tmp_path, damage, reason):
    file = tmp_path / "small.json"
    files.save(sourced(), file)
    text = damage(file.read_text())
    assert text != file.read_text()
    file.write_text(text)
    with pytest.raises(UsageError, match=reason) as refusal:
        files.load(file)
    assert str(file) in str(refusal.value)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"host_bytes": -1.0}, "impossible: host_bytes"),
        ({"sources": {}}, "no source for device.cores, device.flops_per_s.bf16"),
        ({"shares": {}}, "impossible: shares.matmul"),
        ({"nodes": 0}, "impossible: nodes"),
        ({"links": {"moon": Link(1.0, 1.0)}}, r"is damaged: links\.moon"),
    ],
)
def test_a_whole_file_of_an_impossible_machine_is_refused(tmp_path, wrong, reason):
    files.save(replace(sourced(), **wrong), tmp_path / "file.json")
    with pytest.raises(UsageError, match=reason):
        files.load(tmp_path / "file.json")


def test_a_file_of_several_nodes_without_a_network_is_refused(tmp_path):
    """A file of one node needs none."""
    inside = {"node": Link(1e9, 1e-4)}
    for nodes in (1, 2):
        found = replace(machine(), nodes=nodes, links=inside)
        files.save(replace(found, sources=dict.fromkeys(files.constants(found), "test")), tmp_path / f"{nodes}.json")
    assert files.load(tmp_path / "1.json").nodes == 1
    with pytest.raises(UsageError, match=r"2\.json has 2 nodes and knows no network between them"):
        files.load(tmp_path / "2.json")


def test_an_unreadable_value_is_refused(tmp_path):
    file = tmp_path / "file.json"
    body = files.encode(sourced())
    body["curves"]["matmul bf16"]["axes"] = [{"name": "m"}]
    file.write_text(json.dumps({"format": files.FORMAT, "version": 1, "sha256": files._digest(body), **body}))
    with pytest.raises(UsageError, match=r"is damaged: curves\.matmul bf16\.axes\.0\.sizes: Field required"):
        files.load(file)
    body = files.encode(sourced()) | {"moon": 1}
    file.write_text(json.dumps({"format": files.FORMAT, "version": 1, "sha256": files._digest(body), **body}))
    with pytest.raises(UsageError, match="is damaged: moon: Unexpected keyword"):
        files.load(file)
    with pytest.raises(UsageError, match="does not exist; presets are"):
        files.load(tmp_path / "none.json")
    with pytest.raises(UsageError, match="cannot be written"):
        files.save(sourced(), Path("/proc/none.json"))


def test_equal_facts_have_equal_fingerprints():
    assert files.fingerprint({"a": 1, "b": 2}) == files.fingerprint({"b": 2, "a": 1})
    assert files.fingerprint({"a": 1}) != files.fingerprint({"a": 2})


@pytest.mark.parametrize("name", files.presets())
def test_presets_name_the_source_of_every_constant(name):
    made = files.preset(name)
    assert made.origin == ("measured" if name == "cpu" else "published")
    assert set(made.sources) == set(files.constants(made))
    assert all(len(source) > 10 for source in made.sources.values())
    assert bool(made.curves) == (name == "cpu")


def test_presets_have_those_the_project_promises():
    assert {"a100-40", "a100-80", "a800", "b200", "cpu", "h100", "h100-96", "h200"} <= set(files.presets())
    assert files.preset("A800").links["node"].bytes_per_s == 200e9


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        *(("H100", (1, 8)), ("8xH100", (1, 8)), ("2xh200", (1, 2)), ("64xA800", (8, 8)), ("16384xb200", (2048, 8))),
        *(("2x8xh100", (2, 8)), ("3x4xA100-80", (3, 4)), ("64xa100-40", (8, 8)), ("1XB200", (1, 1)), ("h100-96", (1, 8))),
    ],
)
def test_a_cluster_is_named_by_count_and_device(text, shape):
    made = files.cluster(text)
    assert (made.nodes, made.devices_per_node) == shape
    assert made.devices == shape[0] * shape[1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("12xH100", "12 devices do not fill nodes of 8; write 16xH100"),
        ("0xH100", "each at least 1"),
        ("2x0xH100", "each at least 1"),
        ("2x2x2xH100", "write devices, as in 64xH100, or nodes and devices of each, as in 8x8xH100"),
        ("2x16xH100", "a node of H100 has 8 devices; write 32xH100"),
        ("H10", "H10: no preset and no file; did you mean 'h100'"),
        ("64xh1000", "did you mean 'h100'"),
        ("64xA100", "A100 is a100-40 or a100-80; write 64xa100-40 or 64xa100-80"),
        ("64", "no preset and no file; known: a100-40, "),
        ("", "no preset and no file"),
        ("./none.json", "does not exist"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(text, reason):
    with pytest.raises(UsageError, match=reason):
        files.cluster(text)


def test_a_fabric_is_shared_by_the_devices_of_a_node():
    preset = files.preset("h100")
    made = files.cluster("64xH100", "100G")
    assert made.links["network"].bytes_per_s == 100e9 / 8 / 8
    assert made.links["network"].latency_s == preset.links["network"].latency_s
    assert made.links["node"] == preset.links["node"]
    assert "100G a node" in made.sources["links.network.bytes_per_s"]
    assert files.cluster("2x4xH100", "1.6t").links["network"].bytes_per_s == 1.6e12 / 8 / 4
    slow, fast = (network.collective_s(files.cluster("2x8xH100", text), "all_reduce", 1e9, 16, 8) for text in ("100G", "3.2T"))
    assert slow > 10 * fast


def test_cpu_ranks_take_longer_where_they_want_more_cores_than_there_are():
    """Measured by one rank with a thread for each core, or for fewer; measured by each of four."""
    preset = files.preset("cpu")
    for ranks, threads, wanted, slower in ((1, 4, 4, 4), (1, 1, 4, 1), (1, 2, 4, 2), (4, 1, 8, 2), (4, 1, 2, 0.5)):
        measured = replace(preset, devices_per_node=ranks, facts={"cores": 4, "threads": threads})
        found = measured.shared(wanted)
        assert found.matmul_s(512, 512, 512, "float32") == pytest.approx(slower * measured.matmul_s(512, 512, 512, "float32"))
        assert found.device.memory_bytes == measured.device.memory_bytes * ranks / wanted
    unknown = replace(preset, devices_per_node=1, facts={})
    assert unknown.shared(3).shares["matmul"] == pytest.approx(unknown.shares["matmul"] / 3)


@pytest.mark.parametrize("text", ["100", "G", "100M", "0G", "-1G", "100 GB/s", "nanG", ""])
def test_a_fabric_that_cannot_be_is_refused(text):
    with pytest.raises(UsageError, match="bits a second of a node's network cards together, as in 400G"):
        files.cluster("64xH100", text)


def test_a_profile_is_named_by_its_file(tmp_path, monkeypatch):
    small = sourced()
    monkeypatch.chdir(tmp_path)
    for name in ("here.json", "here", "h100"):
        files.save(small, tmp_path / name)
    assert files.cluster("here.json") == files.cluster("here") == files.cluster("./h100") == small
    assert files.cluster("h100") == files.preset("h100")
    with pytest.raises(UsageError, match=r"a profile says its own nodes and devices; write here\.json"):
        files.cluster("2xhere.json")
    (tmp_path / "here.json").write_text("{}")
    with pytest.raises(UsageError, match="is not a profile"):
        files.cluster("here.json")
