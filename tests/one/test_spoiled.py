"""Model folders, tokenizers and documents whose files lead elsewhere or would end the process: refused, by name."""

import json
import subprocess
import sys
import time

import datasets
import psutil
import pyarrow as pa
import pytest
import torch

from longshift.config_parts import Source
from longshift.documents import trial
from longshift.documents.sources import files, read
from longshift.documents.tokenizer import load, train
from longshift.errors import CheckpointError, DataError
from longshift.model.weight_folder import INDEX, WeightFolder
from longshift.model.write_folder import write_folder
from longshift.spec.families import PRESETS, from_hugging_face, to_hugging_face

SPEC = from_hugging_face(to_hugging_face(PRESETS["tiny-llama"]) | {"vocab_size": 64, "num_hidden_layers": 1})
TEXTS = ["two words", "and a line\n", "The end."]


@pytest.fixture
def model(tmp_path):
    write_folder(tmp_path / "m", SPEC, ((p.name, torch.zeros(p.shape)) for p in SPEC.params), torch.float32, max_shard_bytes=200_000)
    return tmp_path / "m"


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "..", ".", "", "a/b", "a\0b", "x" * 300, 7, None, ["a"], {}])
def test_an_index_names_plain_files_of_its_folder(model, name):
    (model.parent / "secret.safetensors").write_bytes(min(model.glob("*.safetensors")).read_bytes())
    index = json.loads((model / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = name
    (model / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json") as caught:
        WeightFolder(model, SPEC)
    assert len(str(caught.value)) < 600


def test_a_link_out_of_a_model_folder_is_refused_and_the_cache_of_the_hub_is_not(model, tmp_path):
    shard, count = min(model.glob("*.safetensors")), len(list(model.glob("*.safetensors")))
    assert count > 1
    outside = tmp_path / "elsewhere" / "x.safetensors"
    outside.parent.mkdir()
    shard.rename(outside)
    shard.symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"model-00001-of-.*\.safetensors is a link out of its folder, to .*elsewhere"):
        WeightFolder(model, SPEC)
    with pytest.raises(CheckpointError, match="start from a folder that holds both"):
        WeightFolder(model, SPEC)
    shard.unlink()
    hub = tmp_path / "hub" / "snapshots" / "0123"
    hub.parent.mkdir(parents=True)
    model.rename(hub)
    (tmp_path / "hub" / "blobs").mkdir()
    outside.rename(tmp_path / "hub" / "blobs" / "abc")
    (hub / shard.name).symlink_to("../../blobs/abc")
    assert len(WeightFolder(hub, SPEC).files) == count


@pytest.mark.parametrize("store", [".git/annex/objects/Zx/09", ".dvc/cache/files/md5/ab", "store", "m/objects"])
def test_links_that_stay_below_the_working_folder_are_followed(model, tmp_path, monkeypatch, store):
    """Those of git-annex, of dvc, of a store beside the model, of a folder inside it; in two steps too. Not from another working folder."""
    (tmp_path / store).mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(sorted(model.glob("*.safetensors"))):
        file.rename(tmp_path / store / f"{number}")
        (tmp_path / f"{number}.link").symlink_to(tmp_path / store / f"{number}")
        file.symlink_to(tmp_path / f"{number}.link")
    monkeypatch.chdir(tmp_path)
    assert WeightFolder(model, SPEC).files
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    if store.startswith("m/"):
        assert WeightFolder(model, SPEC).files
    else:
        with pytest.raises(CheckpointError, match="is a link out of its folder"):
            WeightFolder(model, SPEC)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A tokenizer.json, as JSON."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train(iter(TEXTS * 50), 260).save(str(path))
    return json.loads(path.read_text())


def write(folder, body):
    (folder / "tokenizer.json").write_text(json.dumps(body))
    return folder


def template(ids):
    token = {"SpecialToken": {"id": "[X]", "type_id": 0}}
    special = {"[X]": {"id": "[X]", "ids": ids, "tokens": ["[X]"]}}
    single = [{"Sequence": {"id": "A", "type_id": 0}}, token]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": special,
    }


CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
ENDLESS = {"type": "Split", "pattern": {"Regex": "(a+a+)+$"}, "behavior": "Isolated", "invert": False}
UNIGRAM = {"type": "Unigram", "unk_id": None, "vocab": [["<|endoftext|>", 0.0], ["b", -1.0]], "byte_fallback": False}
WORDS = {"type": "WordLevel", "vocab": {"<|endoftext|>": 0, "two": 1}, "unk_token": "[UNK]"}


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": CHARSMAP},
        {"model": UNIGRAM, "pre_tokenizer": None},
        {"model": WORDS, "pre_tokenizer": {"type": "Whitespace"}},
        {"post_processor": template([10**6])},
        {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []},
        {"model": True},
        {"version": []},
    ],
    ids=["charsmap", "unigram", "words", "id", "empty", "model", "version"],
)
def test_a_tokenizer_that_its_library_cannot_use_is_refused_by_file(good, tmp_path, change):
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read as a tokenizer: ") as caught:
        load(write(tmp_path, good | change))
    assert len(str(caught.value)) < 800


def test_a_pattern_that_never_ends_is_refused(good, tmp_path):
    write(tmp_path, good | {"pre_tokenizer": ENDLESS})
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read as a tokenizer: "):
        load(tmp_path)


def test_a_trial_has_a_deadline(good, tmp_path, monkeypatch):
    """Of computing, however long that takes on a busy machine, and a longer one of waiting."""
    file = write(tmp_path, good) / "tokenizer.json"
    assert trial.why_not(file) is None
    monkeypatch.setattr(trial, "WAITS", 0.1)
    assert "within 0.01 s: look for a pattern of its pre_tokenizer" in str(trial.why_not(file, 0.01))
    monkeypatch.undo()
    write(tmp_path, good | {"pre_tokenizer": ENDLESS})
    assert "within 0.02 s: look for a pattern of its pre_tokenizer" in str(trial.why_not(file, 0.02))


def test_a_trial_ends_with_the_process_that_asked(good, tmp_path):
    file = write(tmp_path, good | {"pre_tokenizer": ENDLESS}) / "tokenizer.json"
    code = "import sys; from pathlib import Path; from longshift.documents.trial import why_not; why_not(Path(sys.argv[1]))"
    with subprocess.Popen([sys.executable, "-c", code, str(file)]) as asker:
        until, found = time.monotonic() + 60, list[psutil.Process]()
        while not found and time.monotonic() < until:
            found = psutil.Process(asker.pid).children()
            time.sleep(0.02)
        asker.kill()
    assert found
    assert not psutil.wait_procs(found, timeout=60)[1]


@pytest.mark.parametrize("eos", [7, [], True, {"content": 3}, "\ud800", "a\0"])
def test_an_end_of_text_that_is_no_text_is_refused(good, tmp_path, eos):
    write(tmp_path, good)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    with pytest.raises(DataError, match=r"tokenizer_config\.json: eos_token .* is not a text"):
        load(tmp_path)


@pytest.fixture
def dataset(tmp_path):
    datasets.Dataset.from_dict({"text": TEXTS * 50}).save_to_disk(tmp_path / "d")
    return tmp_path / "d"


def documents(path):
    return [item for file in files(Source(path=str(path))) for item in read(file)]


@pytest.mark.parametrize(
    "state",
    ["[]", "7", "{}", '{"_data_files": 3}', '{"_data_files": [7]}', "[" * 100_000, "\xff", '{"_data_files": [{"filename": "a\\u0000"}]}'],
)
def test_a_state_of_another_shape_is_refused(dataset, state):
    (dataset / "state.json").write_text(state, encoding="latin-1")
    with pytest.raises(DataError, match=r"d(/state\.json)?: .*_data_files|d: cannot be read as a folder of `datasets`: state\.json: "):
        documents(dataset)


def test_a_dataset_names_files_of_its_folder(dataset):
    state = json.loads((dataset / "state.json").read_text())
    state["_data_files"] = [{"filename": "../other/data.arrow"}]
    (dataset / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=r"state\.json: _data_files: '\.\./other/data\.arrow'"):
        documents(dataset)


def test_offsets_that_lead_out_of_an_arrow_file_are_refused_before_they_are_followed(tmp_path):
    offsets = pa.py_buffer(bytes(4) + (1 << 30).to_bytes(4, "little") + (5).to_bytes(4, "little"))
    column = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"abcdefgh"))
    (tmp_path / "d").mkdir()
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(tmp_path / "d")
    path = next((tmp_path / "d").glob("*.arrow"))
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, pa.schema({"text": pa.string()})) as stream:
        stream.write_batch(pa.record_batch({"text": column}))
    with pytest.raises(DataError, match=r"\.arrow: cannot be read as an Arrow stream: "):
        documents(tmp_path / "d")
