"""What Longshift reads, surface by surface: how a good one is written, spoiled, and read."""

import bz2
import gzip
import json
import lzma
import random
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import spoiled_runs
import torch
from fuzz import ODD_TEXT, Case, Silent, odd_json, spoil_bytes, spoil_mapping

from longshift.config_file import parse_config
from longshift.config_parts import DocumentFormat, Source
from longshift.documents import tokenizer, tokens
from longshift.documents.template_process import TemplateProcess
from longshift.documents.tokenizer import Tokenizer
from longshift.layout.box import Box
from longshift.model.weight_folder import INDEX, WeightFolder
from longshift.model.write_folder import write_folder
from longshift.spec.families import PRESETS, read_spec, to_hugging_face
from longshift.trainer import plan_file
from longshift.trainer.metrics import faults_of_rows

CONFIG = {
    "model": {"preset": "tiny-llama"},
    "data": {"train": [{"path": "a.txt"}], "max_len": "1K", "overlong": "split", "cache": "cache"},
    "train": {"tokens_per_step": "4K", "steps": 10, "lr": 1e-3, "stages": [{"steps": 10, "data.max_len": "2K"}]},
    "layout": [{"upto": "256", "use": "dp2.z1"}, {"upto": "2K", "use": "tp2.chunk512.disk"}],
    "save": {"dir": "run", "every": 5},
}
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
]
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


def config(random_: random.Random, place: Path) -> None:
    """Texts of configs."""
    text = json.dumps(spoil_mapping(random_, CONFIG)) if random_.random() < 0.3 else _flow(random_, CONFIG)
    if random_.random() < 0.3:
        text = spoil_bytes(random_, text.encode(errors="replace")).decode(errors="replace")
    parse_config(text, name=str(place / "run.yaml"))


def _flow(random_: random.Random, values: object) -> str:
    """YAML of which some words are odd."""
    if isinstance(values, dict):
        return "{" + ", ".join(f"{_flow(random_, key)}: {_flow(random_, value)}" for key, value in values.items()) + "}"
    if isinstance(values, list):
        return "[" + ", ".join(_flow(random_, value) for value in values) + "]"
    return random_.choice(ODD_TEXT) if random_.random() < 0.06 else str(values)


def overrides(random_: random.Random, place: Path) -> None:
    """Changes to a config on the command line."""
    keys = [
        "model.preset",
        "model.rope",
        "data.max_len",
        "data.train",
        "data.cache",
        "data.tokenizer",
        "train.lr",
        "train.steps",
        "train.betas",
    ]
    keys += [
        "train.seed",
        "train.clip",
        "train.stages",
        "layout",
        "save.dir",
        "stream.folder",
        "validation",
    ]
    given = [f"{random_.choice([*keys, *ODD_TEXT[:8]])}={random_.choice(ODD_TEXT)}" for _ in range(random_.randint(1, 3))]
    parse_config(json.dumps(CONFIG), given, name=str(place / "run.yaml"))


def model_folder(random_: random.Random, place: Path) -> None:
    """config.json of a model."""
    values = to_hugging_face(PRESETS[random_.choice(["tiny-llama", "tiny-gpt2", "tiny-qwen3", "gemma-3-1b", "llama-3-8b"])])
    text = json.dumps(spoil_mapping(random_, values))
    if random_.random() < 0.2:
        text = spoil_bytes(random_, text.encode()).decode(errors="replace")
    (place / "config.json").write_text(text, encoding="utf-8", errors="replace")
    spec = read_spec(place)
    _ = spec.parameters, len(spec.params)


@lru_cache
def _small() -> str:
    text = Path(json.__file__).read_text()
    core = tokenizer.train(iter([text]), 300)
    core.add_special_tokens(["<|end|>"])
    return core.to_str()


def make() -> None:
    """What cases are made of, before children are forked."""
    _good()
    _weights()
    spoiled_runs.made()


@lru_cache
def _good() -> Tokenizer:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    _tokenizer(folder, _small())
    return tokenizer.load(folder)


def _tokenizer(folder: Path, text: str, template: object = TEMPLATE) -> None:
    (folder / "tokenizer.json").write_text(text, encoding="utf-8", errors="replace")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": template}))


def tokenizer_folder(random_: random.Random, place: Path) -> None:
    """Tokenizers and what lies beside them."""
    values, text = json.loads(_small()), _small()
    if random_.random() < 0.6:
        part = random_.choice(
            ["model", "added_tokens", "pre_tokenizer", "post_processor", "decoder", "normalizer", "truncation", "version"]
        )
        values[part] = spoil_mapping(random_, values[part]) if isinstance(values[part], dict) else odd_json(random_)
        text = json.dumps(values)
    elif random_.random() < 0.5:
        text = spoil_bytes(random_, text.encode()).decode(errors="replace")
    _tokenizer(place, text)
    if random_.random() < 0.3:
        beside = json.dumps(
            spoil_mapping(random_, {"eos_token": "<|end|>", "bos_token": {"content": "<|end|>"}, "chat_template": TEMPLATE})
        )
        (place / "tokenizer_config.json").write_text(beside, errors="replace")
    found = tokenizer.load(place)
    found.encode(["def f(x):\n    return x", "漢字 🙂", " "])
    (place / "a.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    tokens.build([Source(path=str(place / "a.jsonl"), format=DocumentFormat("messages", ("messages",)))], found, place / "cache")


def json_lines(random_: random.Random, place: Path) -> None:
    """JSON lines, of texts and of conversations."""
    chat = random_.random() < 0.5
    record: dict = {"messages": CHAT, "tools": [{"name": "f"}]} if chat else {"text": "one two", "n": 1}
    lines = [json.dumps(record)] * random_.randint(0, 3)
    if chat and random_.random() < 0.6:
        messages = [spoil_mapping(random_, message) for message in CHAT]
        lines.append(json.dumps(record | {"messages": messages}))
    else:
        lines.append(json.dumps(spoil_mapping(random_, record)))
    data = ("\n".join(lines) + "\n").encode()
    (place / "a.jsonl").write_bytes(spoil_bytes(random_, data) if random_.random() < 0.4 else data)
    how = {"format": "messages", "learn": random_.choice(["assistant", "last", "all"])} if chat else {}
    tokens.build([Source(path=str(place / "a.jsonl"), **how)], _good(), place / "cache")


def parquet(random_: random.Random, place: Path) -> None:
    """Parquet files with bits flipped, columns of other types."""
    good = ["a", "b c", "numbers 1 2 3"] * 50
    column: object = random_.choice((good, good, good, good, good, [1, 2], [None, "x"], [["x"]], [{"a": 1}], [b"\xff\xfe"], []))
    pq.write_table(pa.table({"text": column}), place / "a.parquet", compression=random_.choice(("snappy", "none", "zstd")))
    data = (place / "a.parquet").read_bytes()
    (place / "a.parquet").write_bytes(spoil_bytes(random_, data) if random_.random() < 0.8 else data)
    tokens.build([Source(path=str(place / "a.parquet"))], _good(), place / "cache")


def dataset_folder(random_: random.Random, place: Path) -> None:
    """Folders of `datasets` with damaged files."""
    folder = place / "saved"
    datasets.Dataset.from_dict({"text": [f"number {n}" for n in range(100)], "n": list(range(100))}).save_to_disk(folder)
    path = random_.choice(sorted(folder.iterdir()))
    if path.suffix == ".json" and random_.random() < 0.6:
        path.write_text(json.dumps(spoil_mapping(random_, json.loads(path.read_text()))), errors="replace")
    else:
        path.write_bytes(spoil_bytes(random_, path.read_bytes()))
    tokens.build([Source(path=str(folder))], _good(), place / "cache")


@lru_cache
def _weights() -> Path:
    """A model folder of several weight files."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-")) / "model"
    spec = PRESETS["tiny-llama"]
    spec = replace(spec, vocab=64, layers=1)
    write_folder(folder, spec, ((p.name, torch.full(p.shape, 0.5)) for p in spec.params), torch.float32, max_shard_bytes=200_000)
    return folder


def weight_index(random_: random.Random, place: Path) -> None:
    """Weight files of a model folder, and the index of them."""
    folder = place / "model"
    shutil.copytree(_weights(), folder)
    index = folder / INDEX
    files = sorted(folder.glob("*.safetensors"))
    if random_.random() < 0.6:
        values = json.loads(index.read_text())
        for _ in range(random_.randint(1, 3)):
            names = (*ODD_TEXT, files[0].name, files[-1].name, "config.json", INDEX, "../model/" + files[0].name, 7, None, [], {})
            values["weight_map"][random_.choice(sorted(values["weight_map"]))] = random_.choice(names)
        index.write_text(json.dumps(values if random_.random() < 0.6 else spoil_mapping(random_, values)), errors="replace")
    if random_.random() < 0.5:
        path = random_.choice([index, *files])
        path.write_bytes(spoil_bytes(random_, path.read_bytes()))
    if random_.random() < 0.1:
        random_.choice(files).unlink()
    spec = read_spec(folder)
    found = WeightFolder(folder, spec)
    for param in spec.params:
        assert found.read(param.name, Box.whole(param.shape)).shape == param.shape


def tables(random_: random.Random, place: Path) -> None:
    """CSV, TSV, arrays, Arrow files and lines, packed or not, under a name that may say something else."""
    rows = [{"text": f"row {n}, with a comma", "n": n} for n in range(random_.randint(0, 20))]
    made = {
        ".csv": lambda: "text,n\n" + "".join(f'"{row["text"]}",{row["n"]}\n' for row in rows),
        ".tsv": lambda: "text\tn\n" + "".join(f"{row['text']}\t{row['n']}\n" for row in rows),
        ".json": lambda: json.dumps([*rows, *([odd_json(random_)] if random_.random() < 0.2 else [])]),
        ".jsonlines": lambda: "".join(json.dumps(row) + "\n" for row in rows),
        ".txt": lambda: "\ufeffsome words\n" * len(rows),
    }
    suffix = random_.choice([*made, ".arrow"])
    if suffix == ".arrow":
        column = random_.choice((pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()), pa.int64()))
        values = [row["n"] if column == pa.int64() else row["text"] for row in rows]
        table = pa.table({"text": pa.array(values, pa.int64() if column == pa.int64() else pa.string()).cast(column)})
        with pa.OSFile(str(place / "a"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        data = (place / "a").read_bytes()
    else:
        data = made[suffix]().encode(errors="replace")
    data = spoil_bytes(random_, data) if random_.random() < 0.4 else data
    pack = random_.choice((None, None, gzip.compress, bz2.compress, lzma.compress, lambda raw: pa.compress(raw, "zstd", asbytes=True)))
    if pack:
        data = pack(data)
        data = spoil_bytes(random_, data) if random_.random() < 0.4 else data
    path = (
        place / f"a{suffix if random_.random() < 0.8 else random_.choice([*made, '.arrow', '.parquet', ''])}{random_.choice(('', '.gz'))}"
    )
    path.write_bytes(data)
    how = random_.choice(({}, {}, {"format": {"text": "text"}}, {"format": {"text": random_.choice(("n", "none", "txt"))}}))
    tokens.build([Source(path=str(path), **how)], _good(), place / "cache")


def record_fields(random_: random.Random, place: Path) -> None:
    """Fields of records and of messages that other trainers know."""
    said = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "Bob"},
        {"role": "assistant", "content": "Hello", "weight": 1, "reasoning_content": "a thought of some length", "train": True},
        {"from": "human", "value": "What?"},
        {"role": "assistant", "content": "That.", "loss": False},
    ]
    record = {
        "messages": [spoil_mapping(random_, message) if random_.random() < 0.3 else message for message in said],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": None}}}],
        **{"system": "Be kind.", "documents": [{"title": "a", "text": "b"}], "chat_template_kwargs": {"enable_thinking": False}, "id": 7},
    }
    lines = [json.dumps(spoil_mapping(random_, record) if random_.random() < 0.6 else record) for _ in range(random_.randint(1, 3))]
    (place / "a.jsonl").write_text("\n".join(lines) + "\n")
    how = {"format": "messages", "learn": random_.choice(["assistant", "last", "all"])}
    notes = tokens.build([Source(path=str(place / "a.jsonl"), **how)], _good(), place / "cache").notes
    if any('"id"' in line for line in lines) and not any("id" in note for note in notes):
        raise Silent("a field that no token shows is not named")


PIECES = (
    *("{{ m.content }}", "{{ m.role }}", "{% for m in messages %}", "{% endfor %}", "{% if add_generation_prompt %}", "{% endif %}"),
    *("{% generation %}", "{% endgeneration %}", "{{ messages[0]['content'] * 99999999 }}", "{{ range(99999) | list }}", "<|end|>"),
    *("{% set n = namespace(x='ab') %}", "{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "{{ ''.__class__ }}"),
    *(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ raise_exception('no') }}",
        "{{ tools | tojson }}",
    ),
    *("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "{{ 2 ** 999999999 }}", "{{ cycler }}", "{{ lipsum() }}", "{{ x.y.z }}"),
)


def templates(random_: random.Random, place: Path) -> None:
    """Chat templates, hostile ones among them."""
    text = TEMPLATE
    for _ in range(random_.randint(0, 4)):
        at = random_.randrange(len(text) + 1)
        text = text[:at] + random_.choice(PIECES) + text[at:]
    if random_.random() < 0.3:
        text = spoil_bytes(random_, text.encode()).decode(errors="replace")
    _tokenizer(place, _small(), text if random_.random() < 0.9 else odd_json(random_))
    (place / "a.jsonl").write_text(json.dumps({"messages": CHAT, "tools": [{"name": "f"}]}) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "TemplateProcess", partial(TemplateProcess, deadline_s=1.0, most_bytes=1 << 29))
        tokens.build(
            [Source(path=str(place / "a.jsonl"), format=DocumentFormat("messages", ("messages",)))], tokenizer.load(place), place / "cache"
        )


def diaries(random_: random.Random, place: Path) -> None:
    """`metrics.jsonl` and `plan.json` of a run."""
    rows = [{"step": step, "loss": 1.0 / step, "tokens": 96, "valid_loss": None} for step in range(1, random_.randint(2, 6))]
    lines = [json.dumps(spoil_mapping(random_, row) if random_.random() < 0.2 else row) for row in rows]
    data = ("\n".join(lines) + random_.choice(("", "\n"))).encode()
    (place / "metrics.jsonl").write_bytes(spoil_bytes(random_, data) if random_.random() < 0.5 else data)
    plan = {"asked": {}, "choices": ["dp1"], "facts": {"tried": [{"seconds": 1.0}]}, "trials": [], "chosen": 0, "home": None}
    text = json.dumps(spoil_mapping(random_, plan) if random_.random() < 0.7 else odd_json(random_))
    (place / "plan.json").write_bytes(spoil_bytes(random_, text.encode()) if random_.random() < 0.3 else text.encode())
    first, second = (lambda: faults_of_rows(place / "metrics.jsonl", 3, 1.0 / 3)), (lambda: plan_file.read(place))
    for read in random_.sample((first, second), 2):
        read()


SURFACES: Mapping[str, tuple[Case, tuple[str, ...]]] = {
    "config": (config, ()),
    "overrides": (overrides, ("command line",)),
    "model folder": (model_folder, ()),
    "tokenizer": (tokenizer_folder, ()),
    "json lines": (json_lines, ()),
    "parquet": (parquet, ()),
    "dataset": (dataset_folder, ()),
    "weight index": (weight_index, ()),
    "checkpoint": (spoiled_runs.case, ()),
    "tables": (tables, ()),
    "record fields": (record_fields, ()),
    "templates": (templates, ()),
    "diaries": (diaries, ()),
}
