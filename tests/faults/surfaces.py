"""What is read from outside: how good input of each kind is made, spoiled and read."""

import json
import random
import warnings
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from fuzz import Surface

from longshift.config import Source, load_config
from longshift.data.sources import files, read
from longshift.data.tokenizer import load, train
from longshift.layout.box import Box
from longshift.model.huggingface import WeightFolder, write_folder
from longshift.spec.families import from_hugging_face, read_spec

CONFIG = """\
model: {preset: tiny-llama}
data:
  train: [{corpus: python}, {path: "books/*.parquet", text: body}]
  max_len: 4K
  overlong: split
train:
  tokens_per_step: 16K
  steps: 100
  lr: 3e-4
  betas: [0.9, 0.95]
layout: [{upto: 1K, use: dp4}, {upto: 4K, use: tp2.u2, pack: 8K}]
switch: {bucket: 16M}
save: {dir: runs/demo}
"""
KEYS = ("model.preset", "model.path", "model.rope", "data.train", "data.cache", "data.max_len", "data.tokenizer", "train.lr", "train.steps")
KEYS += ("train.betas", "train.stages", "train.timeout", "layout", "switch.bucket", "save.dir", "save", "", "a.b.c", "validation", "stream")
WORDS = ("&a [*a]", "*a", "!!float abc", "!!timestamp x", "!!bool xyz", "2024-99-99", "0x_", "1" * 5000, "[" * 500, "{a: " * 500, "~", "\0")
WORDS += (
    "\ud800",
    '"\\ud800"',
    "~nosuchuser/x",
    "x" * 5000,
    "x/" * 3000,
    "1e30",
    "1" + "0" * 30,
    "-1",
    "nan",
    ".inf",
    "yes",
    "[]",
    "{}",
    "''",
)
WORDS += (
    "dp1000000",
    "dp" + "9" * 40,
    "pp2:3-1",
    "dp4.dp4",
    "auto",
    "{auto: {ranks: 1" + "0" * 20 + "}}",
    "a: b: c",
    "---",
    "%YAML 9.9",
    "<<",
)
WORDS += (
    "[{upto: 1" + "0" * 30 + ", use: dp4}]",
    "[{upto: 4K, use: dp1000000}]",
    "{type: linear, factor: 1" + "0" * 60 + "}",
    "..",
    "/etc/passwd",
)
VALUES: tuple[Any, ...] = (True, False, None, 0, -1, 1, 2**31, 2**63, 10**30, 10**60, 0.5, -1e300, 1e300, "", "x", "..", "\0", "a" * 300)
VALUES += ([], [1], ["x"], [[]], {}, {"a": 1}, "/etc/passwd", "../../x", "\ud800", [None], {"type": "x"}, "(a+)+$", "[UNK]")


def spoil_bytes(r: random.Random, path: Path) -> None:
    """Flip bits, cut, repeat, or put in some bytes, one to four times."""
    data = bytearray(path.read_bytes())
    for _ in range(r.randint(1, 4)):
        at, size = r.randrange(len(data) + 1), r.choice((1, 2, 8, 64, 1024))
        act = r.randrange(5)
        if act < 2 and at < len(data):
            data[at] ^= 1 << r.randrange(8)
        elif act == 2:
            del data[at : at + size]
        elif act == 3:
            data[at:at] = data[at : at + size]
        else:
            data[at:at] = r.choice(WORDS).encode(errors="surrogatepass")[:size]
    path.write_bytes(data[: r.randrange(len(data) + 1)] if r.random() < 0.1 else data)


def spoil_json(r: random.Random, path: Path) -> None:
    """Put another value, or none, in the place of some values of a JSON file, most often near its root."""
    whole = {"": json.loads(path.read_text("utf-8"))}
    for _ in range(r.randint(1, 2)):
        inside: Any = whole
        key: Any = ""
        while isinstance(inside[key], dict | list) and inside[key] and (inside is whole or r.random() < 0.7):
            inside = inside[key]
            key = r.choice([*inside]) if isinstance(inside, dict) else r.randrange(len(inside))
        if inside is not whole and r.random() < 0.2:
            del inside[key]
        else:
            inside[key] = r.choice(VALUES)
    text = json.dumps(whole[""])
    path.write_text("[" * 100_000 if r.random() < 0.02 else text, "utf-8")


def spoil_any(r: random.Random, folder: Path) -> None:
    path = r.choice(sorted(folder.iterdir()))
    if path.suffix == ".json" and r.random() < 0.7:
        spoil_json(r, path)
    else:
        spoil_bytes(r, path)


# Configs


def _make_config(folder: Path) -> None:
    (folder / "run.yaml").write_text(CONFIG)


def _spoil_config(r: random.Random, folder: Path) -> tuple[str, ...]:
    path = folder / "run.yaml"
    if r.random() < 0.5:
        spoil_bytes(r, path)
        return ()
    lines = CONFIG.splitlines()
    for _ in range(r.randint(1, 3)):
        at = r.randrange(len(lines))
        key, sign, _ = lines[at].partition(":")
        lines[at] = f"{key}{sign} {r.choice(WORDS)}"
    path.write_bytes("\n".join(lines).encode(errors="surrogatepass"))
    return ()


def _spoil_overrides(r: random.Random, _folder: Path) -> tuple[str, ...]:
    return tuple(f"{r.choice(KEYS)}{r.choice(('=', '=', '=', '==', '.', ''))}{r.choice(WORDS)}" for _ in range(r.randint(1, 3)))


def _read_config(folder: Path, overrides: tuple[str, ...]) -> object:
    return load_config(folder / "run.yaml", overrides).to_yaml()


# Model folders

SMALL = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24}
SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
SMALL |= {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "layer_types": ["full_attention"] * 2,
}


def _make_model(folder: Path) -> None:
    spec = from_hugging_face(SMALL)
    made = folder / "made"
    tensors = ((p.name, torch.zeros(p.shape)) for p in spec.params)
    write_folder(made, spec, tensors, torch.float32, max_shard_bytes=8192)
    for path in made.iterdir():
        path.rename(folder / path.name)
    made.rmdir()


def _read_model(folder: Path, _: object) -> object:
    with warnings.catch_warnings(action="ignore"):
        spec = read_spec(folder)
    weights = WeightFolder(folder, spec)
    return [weights.read(p.name, Box.whole(p.shape)) for p in spec.params]


# Tokenizers and documents

TEXTS = ["a", "two words\nand lines", "ä日本🙂", "x" * 3000, "The end. " * 40]


def _make_tokenizer(folder: Path) -> None:
    train(iter(TEXTS * 20), 280).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')


def _read_tokenizer(folder: Path, _: object) -> object:
    return load(folder).encode(TEXTS)


def _make_dataset(folder: Path) -> None:
    datasets.Dataset.from_dict({"text": TEXTS * 20}).save_to_disk(folder)


def _make_jsonl(folder: Path) -> None:
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in TEXTS))


def _make_parquet(folder: Path) -> None:
    pq.write_table(pa.table({"text": TEXTS * 20, "n": [1] * len(TEXTS) * 20}), folder / "a.parquet")


def _read_documents(folder: Path, name: str) -> object:
    return [list(read(file)) for file in files(Source(path=str(folder / name)))]


def _documents(name: str, make: Any, path: str) -> Surface:
    return Surface(name, make, lambda r, folder: spoil_any(r, folder) or path, _read_documents, ("case-",))


SURFACES = {
    surface.name: surface
    for surface in (
        Surface("config", _make_config, _spoil_config, _read_config, ("run.yaml",)),
        Surface("overrides", _make_config, _spoil_overrides, _read_config, ("command line: ", "run.yaml:")),
        Surface("model", _make_model, spoil_any, _read_model, ("case-",)),
        Surface("tokenizer", _make_tokenizer, spoil_any, _read_tokenizer, ("case-",)),
        _documents("dataset", _make_dataset, ""),
        _documents("jsonl", _make_jsonl, "a.jsonl"),
        _documents("parquet", _make_parquet, "a.parquet"),
    )
}
