"""What a person writes in YAML is a value with its lines, or one located fault, in a moment: whatever the text is."""

import json
import math
import time

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from longshift.config_file import load_config, parse_config
from longshift.errors import UsageError
from longshift.yaml_reader import MAX_BYTES, MAX_DEPTH, read_yaml

GOOD = """\
model: {preset: tiny-llama}
data: {train: [{corpus: python}], max_len: 4K}
train: {tokens_per_step: 16K, steps: 100, lr: 3e-4}
save: {dir: runs/demo}
"""
MOST_S = 8.0  # the slowest takes a second where nothing else runs

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(10**50), 10**50)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
)
KEYS = st.text("abcxyz_", min_size=1, max_size=5)


@settings(max_examples=300)
@given(st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12))
def test_what_is_dumped_reads_back(value):
    for style in (None, True, False):
        assert read_yaml(yaml.safe_dump(value, default_flow_style=style), "f").value == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 2024-99-99", {"a": "2024-99-99"}),
        ("a: 2024-01-01", {"a": "2024-01-01"}),
        ("a: 0x_", {"a": "0x_"}),
        ("a: 0b_", {"a": "0b_"}),
        ("a: 1:30", {"a": "1:30"}),
        ("a: 1_000", {"a": 1000}),
        ("a: 3e-4", {"a": "3e-4"}),
        ("a: -1.5e+3", {"a": -1500.0}),
        ("a: -.inf", {"a": -math.inf}),
        ("a: [Yes, NO, on, ~, Null, yEs]", {"a": [True, False, True, None, None, "yEs"]}),
        ("a: 'yes'", {"a": "yes"}),
        ("<<: {b: 1}", {"<<": {"b": 1}}),
        ("1: {null: x}", {"1": {"null": "x"}}),
        ("a:", {"a": None}),
        ("", None),
    ],
)
def test_scalars_are_plain(text, value):
    assert read_yaml(text, "f").value == value


def test_every_key_has_its_line_and_twice_is_said():
    found = read_yaml("a: 1\nb:\n  - x\n  - c: 2\na: 3\n", "f")
    assert found.lines == {(): 1, ("a",): 5, ("b",): 2, ("b", 0): 3, ("b", 1): 4, ("b", 1, "c"): 4}
    assert found.twice == [(("a",), 5)]


LAUGHS = "\n".join(["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)])
BAD = [
    ("a: 1\nb: !!float abc", ":2: ", "is a tag"),
    ("a: !!timestamp 2024-99-99", ":1: ", "is a tag"),
    ("a: !!bool xyz", ":1: ", "is a tag"),
    ("a: !!python/object/apply:os.system [ls]", ":1: ", "is a tag"),
    ("a: " + "1" * 5000, ":1: ", "a number of 5000 digits"),
    ("a: 1" + "1" * 5000 + ".0", ":1: ", "a number of 5003 digits"),
    ("a: &a [*a]", ":1: ", "anchor or an alias"),
    ("\n&a x: 1", ":2: ", "anchor or an alias"),
    (LAUGHS, ":1: ", "anchor or an alias"),
    ("[" * 20_000, ":1: ", f"more than {MAX_DEPTH} lists"),
    ("a: " + "{x: " * 20_000, ":1: ", f"more than {MAX_DEPTH} lists"),
    ("- " * 20_000, ":1: ", f"more than {MAX_DEPTH} lists"),
    ('a: "\\ud800"', ":1: ", "half of a surrogate pair"),
    ('a: "\\0"', ":1: ", "a null byte"),
    ('"\\0": 1', ":1: ", "a null byte"),
    ('a: "\\UFFFFFFFF"', ":1: ", "is not YAML"),
    ("%YAML " + "1" * 5000 + ".1\n---\na: 1", ":1: ", "is not YAML"),
    ("\0", "", "is not YAML"),
    ("a: \ud800", "", "is not YAML"),
    ("a: [", " is not YAML", "line 1"),
    ("? [a, b]\n: 1", ":1: ", "a list or a mapping stands where a key is needed"),
    ("a: 1\n---\nb: 2", ":2: ", "a second document"),
    ("".join(f"k{n}: 1\n" for n in range(20_000)), ":5000: ", "more than 10000 keys and values"),
    ("a: 1\n" * (MAX_BYTES // 2), "", "is this the right file?"),
]


@pytest.mark.parametrize(("text", "where", "why"), BAD, ids=range(len(BAD)))
def test_what_is_not_plain_is_refused_with_its_line(text, where, why):
    started = time.monotonic()
    with pytest.raises(UsageError) as caught:
        parse_config(text, name="run.yaml")
    said = str(caught.value)
    assert said.startswith(f"run.yaml{where}"), said
    assert why in said
    assert len(said) < 600
    assert time.monotonic() - started < MOST_S


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("a:1 \n-[]{},&*!|>'\"%@`#?~\t\0\ud800\\xuU_.")), st.text(st.sampled_from("a1.=[]{}&*!'\"\\\0\ud800:, ~")))
def test_any_text_is_read_or_refused(text, override):
    for change in ((), (override,), (f"train.lr={override}",), (f"data.cache={override}",), (f"layout={override}",)):
        for config in (text, GOOD):
            said = "run.yaml"
            try:
                parse_config(config, change, name="run.yaml")
            except UsageError as fault:
                said = str(fault)
            assert said.startswith("run.yaml")


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("data.cache=~nosuchuser/x", "data.cache: '~nosuchuser/x': there is no such user"),
        ("data.cache=" + "x" * 300, "a name has at most 255 bytes"),
        ("data.tokenizer=" + "x/" * 3000, "a path 4095"),
        ("save.dir=a\0b", "holds a null byte"),
        ("save.dir=a\udcffb", "half of a surrogate pair"),
        ("train.steps=" + "9" * 5000, "train.steps: "),
        ("layout=&a [*a]", "layout: "),
        ("a" + ".a" * 5000 + "=1", "more than 32 dots"),
        ("data.overlong=" + "x" * 100_000, "data.overlong: 'xxx"),
        ("train.schedule=2024-99-99", "'2024-99-99' is not one of cosine"),
    ],
)
def test_overrides_are_refused_in_a_line(override, why):
    with pytest.raises(UsageError) as caught:
        parse_config(GOOD, [override], name="run.yaml")
    said = str(caught.value)
    assert "command line: " in said
    assert why in said
    assert len(said) < 1000, len(said)


def test_many_faults_are_counted_and_not_all_told():
    started = time.monotonic()
    with pytest.raises(UsageError, match=r"(?s)^config: 3004 faults .* and 2954 more$") as caught:
        parse_config(json.dumps({f"key{n}": 1 for n in range(3000)}))
    assert len(str(caught.value).splitlines()) == 52
    assert time.monotonic() - started < MOST_S


def test_files_that_are_no_config_are_refused(tmp_path):
    for name, why in (("/dev/zero", "no plain file"), (str(tmp_path), "no plain file"), ("x" * 300, "cannot be read")):
        with pytest.raises(UsageError, match=why):
            load_config(name)
    large = tmp_path / "large.yaml"
    large.write_bytes(b"a" * (MAX_BYTES + 1))
    with pytest.raises(UsageError, match="has more than"):
        load_config(large)
    large.write_bytes(b"a: \xff")
    with pytest.raises(UsageError, match="can't decode byte"):
        load_config(large)
