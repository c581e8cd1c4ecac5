"""Every how-to of the docs, played in a clean shell: its commands as they stand on the page, in order, and what the page shows after each.

A page has its sizes as shell variables; small values are put there, and nothing else is changed. `hf`, which needs a network, brings a tiny
model, and `pip` installs nothing; documents lie where the page says that they do. A page shows what these small runs print. Its words must
be those of the commands; its numbers may differ.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from longshift.config_file import load_config
from longshift.documents.tokenizer import END_OF_TEXT
from longshift.documents.tokenizer import train as train_tokenizer

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (Path(__file__).parent / "text.txt").read_text()
FENCE = re.compile(r"^```(bash|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
END = "@@ end of block"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    + END_OF_TEXT
    + "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)
SIZES: Mapping[str, Mapping[str, str]] = {
    "continue-pretrain-books": {
        **{"MODEL": "some/model", "LAYOUT": "dp2.z2.recompute-selective"},
        **{"MAX_LEN": "128", "TOKENS": "512", "STEPS": "3", "MORE": "4", "EVERY": "2"},
    },
    "chat-sft-lora": {"MODEL": "some/model", "RANK": "4", "MAX_LEN": "64", "TOKENS": "256", "STEPS": "3", "EVERY": "2"},
    "one-node-of-8": {"MODEL": "some/model", "CLUSTER": "2xH100", "MAX_LEN": "256", "TOKENS": "1K", "STEPS": "2", "LAYOUT": "dp2.z1"},
    "from-8k-to-1m": {
        **{"MODEL": "some/model", "TOKENS": "512", "STEPS": "2", "SHORT": "64", "MIDDLE": "128", "LONG": "256", "CHUNK": "64"},
        **{"FIRST": "dp2", "SECOND": "u2.recompute-full", "THIRD": "u2.chunk$CHUNK.disk"},
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a hub has them: weights, a tokenizer, a chat template."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=64, max_position_embeddings=256)).save_pretrained(folder)
    train_tokenizer(iter([TEXT]), 512).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TEXT, "chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def place(tmp_path: Path, model: Path) -> Path:
    """A folder with documents, and commands `hf` and `pip`."""
    commands, texts = tmp_path / "bin", [TEXT[start:] + TEXT[:start] for start in range(0, len(TEXT), 400)]
    for name in ("bin", "work/books", "work/chats", "work/documents"):
        (tmp_path / name).mkdir(parents=True)
    (commands / "hf").write_text(f'#!/bin/sh\ntest "$1 $3" = "download --local-dir" && cp -r {model} "$4"\n')
    (commands / "pip").write_text('#!/bin/sh\ntest "$*" = "install . huggingface_hub"\n')
    for name in ("hf", "pip"):
        (commands / name).chmod(0o755)
    (commands / "longshift").symlink_to(Path(sys.executable).parent / "longshift")
    for number, text in enumerate(texts):
        for part in range(6):
            (tmp_path / f"work/books/{number}-{part}.txt").write_text(text[1000 * part :][: 60 + 300 * (part % 4)])
    chats = [[{"role": "user", "content": f"{n} + {n}?"}, {"role": "assistant", "content": f"It is {2 * n}."}] for n in range(200)]
    documents = [{"text": text[: 200 * n]} for n, text in enumerate(texts, 1)]
    for name, rows in (("chats", [{"messages": chat} for chat in chats]), ("documents", documents)):
        (tmp_path / f"work/{name}/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def with_sizes(block: str, sizes: Mapping[str, str]) -> str:
    """The block of a page that sets its sizes, with other values. Whatever it sets has one, and it does nothing else."""
    names = re.findall(r"^([A-Z_]+)=\S+$", block.replace(" ", "\n"), re.MULTILINE)
    assert len(block.split()) == len(names)
    assert sorted(names) == sorted(sizes)
    return "".join(f"{name}={sizes[name]}\n" for name in names)


def words(line: str) -> str:
    """A line without its numbers, their units' prefixes, bars and the width of columns."""
    line = re.sub(r"(?<![A-Za-z])[KMGT]i?(?=B\b|FLOP)", "", line.replace("█", " "))
    return " ".join(re.sub(r"\d[\d,]*(\.\d+)?(e[+-]?\d+)?[KM]?(?![a-z])", "#", line).split())


def first_not_printed(shown: str, printed: str) -> str | None:
    """The first line of the page that is not, in the page's order, among the lines that were printed; empty lines aside."""
    lines = iter([words(line) for line in printed.splitlines()])
    return next((line for line in shown.splitlines() if line.strip() and words(line) not in lines), None)


@pytest.mark.parametrize("page", SIZES)
def test_a_how_to_ends_where_it_says(place: Path, page: str):
    blocks = FENCE.findall((DOCS / f"how-to/{page}.md").read_text())
    commands = [text for kind, text in blocks if kind == "bash"]
    (at,) = (number for number, text in enumerate(commands) if text.startswith("MODEL="))
    commands[at] = with_sizes(commands[at], SIZES[page])
    script = "".join(f"{text}\necho '{END}'\n" for text in commands)
    path = f"{place / 'bin'}:/usr/bin:/bin"
    clean = {"PATH": path, "HOME": str(place), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    if "LD_LIBRARY_PATH" in os.environ:
        clean["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    place, how = place / "work", {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 300}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=place, env=clean, **how)
    assert done.returncode == 0, done.stdout
    said, at = done.stdout.split(f"{END}\n"), -1
    for kind, text in blocks:
        at += kind == "bash"
        missed = first_not_printed(text, said[at]) if kind == "text" else None
        assert missed is None, f"{missed!r} is not in what the page's commands printed, or not in this order:\n{said[at]}"
    if page == "one-node-of-8":  # the config that is planned is for the cluster that was named, not for what `init` has written
        assert load_config(place / "best.yaml").world == 2


def test_numbers_may_differ_from_the_page_and_words_may_not():
    printed = "step 1/3  loss 6.2515  lr 2.00e-05  2,191 tokens/s  550 MFLOP/s  298 MiB\nto 1K   6.1%  ██  \ndone"
    assert first_not_printed("step 3/8  loss 6.1  lr 1.83e-05  91 tokens/s  2.1 GFLOP/s  1.2 GiB\nto 128  66.1%  ███\n", printed) is None
    assert first_not_printed("step 3/8  loss 6.1\n", printed) == "step 3/8  loss 6.1"
    assert first_not_printed("done\nto 1K  6.1%\n", printed) == "to 1K  6.1%"
    assert words("home is cut as dp2") != words("home is cut as u2")
    assert words("4 leaked positions") != words("4 wrong labels")


def test_every_how_to_is_played():
    assert sorted(path.stem for path in (DOCS / "how-to").glob("*.md")) == sorted(SIZES)
