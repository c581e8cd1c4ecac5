"""Conversations: which tokens are learned, against `transformers`, and what is refused."""

import json
import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from chat_templates import FAMILIES, THINKING, Family
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from longshift.config_parts import DataConfig, DocumentFormat, Source, TrainSource
from longshift.documents.batch import Batches
from longshift.documents.chat import BadRecord, render_record
from longshift.documents.record_notes import RecordNotes
from longshift.documents.tokenizer import Tokenizer, load, train
from longshift.documents.tokens import build
from longshift.errors import DataError
from longshift.model.loss import IGNORE

SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "Wie heißt du? 漢字 🙂"},
    {"role": "assistant", "content": "I have no name.\n\nAnd you?"},
    {"role": "user", "content": "None."},
    {"role": "assistant", "content": "Good  -- <b>bye</b>"},
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Köln", "days": 2}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALLS = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "no"},
    {"role": "tool", "content": "yes"},
    {"role": "assistant", "content": "Perhaps."},
]


@pytest.fixture(scope="session")
def plain() -> tokenizers.Tokenizer:
    return train(iter([Path(json.__file__).read_text()]), 300)


def folder_of(family: Family, template: str, plain: tokenizers.Tokenizer, folder: Path) -> Path:
    """A tokenizer folder as models have it."""
    core = tokenizers.Tokenizer.from_str(plain.to_str())
    core.add_special_tokens(list(family.special))
    folder.mkdir()
    core.save(str(folder / "tokenizer.json"))
    names = {"eos_token": family.eos} | ({"bos_token": family.bos} if family.bos else {})
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **names}))
    return folder


def peer_of(folder: Path) -> PreTrainedTokenizerFast:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **config)


def write(path: Path, records) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return path


def learned_of(tokenizer: Tokenizer, path: Path, cache: Path, **how) -> list[tuple[list[int], list[bool]]]:
    """Ids and masks of the documents in a file."""
    made = build([Source(path=str(path), **({"format": "messages"} | how))], tokenizer, cache)
    masks = [made.learned(d) for d in range(len(made))]
    return [(made.tokens(d).tolist(), mask.astype(bool).tolist()) for d, mask in enumerate(masks) if mask is not None]


def by_prefixes(peer, messages, special: set[int], **kwargs) -> list[bool]:
    """What the assistant says, by counting the tokens of prefixes that `transformers` renders, to the first special token after it."""
    ids = peer.apply_chat_template(messages, return_dict=False, **kwargs)
    mask = [False] * len(ids)
    for nth, message in enumerate(messages):
        if message["role"] == "assistant":
            first = len(peer.apply_chat_template(messages[:nth], add_generation_prompt=True, return_dict=False, **kwargs))
            last = next(i for i in range(first, len(ids)) if ids[i] in special)
            mask[first : last + 1] = [True] * (last + 1 - first)
    return mask


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("marked", [True, False], ids=["markers", "prefixes"])
def test_what_is_learned_is_what_transformers_marks(name, marked, plain, tmp_path):
    family = FAMILIES[name]
    folder = folder_of(family, family.marked() if marked else family.plain(), plain, tmp_path / "model")
    peer, tokenizer = peer_of(folder), load(folder)
    chats = [TURNS, TURNS[:2], [*TURNS, {"role": "user", "content": "?"}]] + ([[SYSTEM, *TURNS]] if family.system else [])
    records = [{"messages": chat} for chat in chats] + ([{"messages": CALLS, "tools": TOOLS}] if family.tools else [])
    found = learned_of(tokenizer, write(tmp_path / "chats.jsonl", records), tmp_path / "cache")
    special = {peer.convert_tokens_to_ids(token) for token in family.special}
    for record, (ids, mask) in zip(records, found, strict=True):
        kwargs = {"tools": record["tools"]} if "tools" in record else {}
        if marked:
            expected = peer.apply_chat_template(record["messages"], return_assistant_tokens_mask=True, return_dict=True, **kwargs)
            reference, wanted = expected["input_ids"], [bool(n) for n in expected["assistant_masks"]]
        else:
            reference = peer.apply_chat_template(record["messages"], return_dict=False, **kwargs)
            wanted = by_prefixes(peer, record["messages"], special, **kwargs)
        added = len(ids) - len(reference)  # end of text, where the template ends with none
        assert ids[: len(reference)] == reference
        assert mask[: len(reference)] == wanted
        assert added == (0 if any(token in peer.decode(reference[-2:]) for token in family.special) else 1)
        assert True in wanted
        assert False in wanted


def test_a_mutant_of_the_mask_is_seen(plain, tmp_path, monkeypatch):
    family = FAMILIES["qwen"]
    folder = folder_of(family, family.plain(), plain, tmp_path / "model")
    path = write(tmp_path / "chats.jsonl", [{"messages": TURNS}])
    right = learned_of(load(folder), path, tmp_path / "a")
    monkeypatch.setattr("longshift.documents.tokens.TemplateProcess", nullcontext)  # the mistake is of this process
    monkeypatch.setattr("longshift.documents.template.ChatTemplate._cut_after_end", lambda self, turn: turn)
    assert learned_of(load(folder), path, tmp_path / "b") != right


def test_labels_are_the_tokens_that_are_learned(plain, tmp_path):
    family = FAMILIES["qwen"]
    tokenizer = load(folder_of(family, family.plain(), plain, tmp_path / "model"))
    path = write(tmp_path / "chats.jsonl", [{"messages": TURNS}])
    cache = build([Source(path=str(path), format=DocumentFormat("messages", ("messages",)))], tokenizer, tmp_path / "cache")
    whole = Batches(cache, 0, 1, 1000).at(0)
    (document,) = whole.documents
    said = tokenizer.core.decode([t for t in document.labels if t != IGNORE], skip_special_tokens=False)
    assert said == "".join(turn["content"] + "<|im_end|>" for turn in TURNS if turn["role"] == "assistant")
    assert whole.target_tokens == cache.learned(0).sum()
    pieces = Batches(cache, 0, 1, 16, "split")
    steps, cursor = [], 0
    while cursor < len(pieces.spans):
        steps.append(pieces.at(cursor))
        cursor = steps[-1].next_cursor
    assert min(step.target_tokens for step in steps) >= 1  # a piece of a prompt goes with the next
    assert any(len(step.documents) > 1 for step in steps)
    with pytest.raises(DataError, match="no token that is learned is left"):
        Batches(cache, 0, 1, 4, "truncate").at(0)


def test_a_step_waits_for_a_learned_document_over_two_shuffles(plain, tmp_path):
    """Between one that is first in a pass and last in the next there are more documents than there are."""
    tokenizer = load(folder_of(FAMILIES["chatml"], FAMILIES["chatml"].plain(), plain, tmp_path / "model"))
    turns = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": int(n == 0)}]} for n in range(5)
    ]
    path = write(tmp_path / "chats.jsonl", turns)
    cache = build([Source(path=str(path), format=DocumentFormat("messages", ("messages",)))], tokenizer, tmp_path / "cache")
    counts = []
    for seed in range(4):
        batches, cursor = Batches(cache, seed, 1, 1000), 0
        for _ in range(20):
            step = batches.at(cursor)
            assert step.target_tokens
            cursor = step.next_cursor
            counts.append(len(step.documents))
    assert max(counts) > 6


def test_the_last_turn_alone_and_everything(plain, tmp_path):
    tokenizer = load(folder_of(FAMILIES["chatml"], THINKING, plain, tmp_path / "model"))
    path = write(tmp_path / "chats.jsonl", [{"messages": TURNS}])
    with pytest.raises(DataError, match=r"chats.jsonl, line 1, byte 0: 'messages': .* turn 2, of the assistant, otherwise .* learn: last"):
        learned_of(tokenizer, path, tmp_path / "cache")
    ((ids, mask),) = learned_of(tokenizer, path, tmp_path / "cache", learn="last")
    said = tokenizer.core.decode([t for t, learned in zip(ids, mask) if learned], skip_special_tokens=False)
    assert said == "<think>\n\n</think>\n\nGood  -- <b>bye</b><|im_end|>"
    ((_, mask),) = learned_of(tokenizer, path, tmp_path / "cache", learn="all")
    assert all(mask)


def test_prompts_and_completions(plain, tmp_path):
    family = FAMILIES["llama3"]
    tokenizer = load(folder_of(family, family.plain(), plain, tmp_path / "model"))
    pairs = {"format": {"prompt": "prompt", "completion": "completion"}}
    path = write(tmp_path / "a.jsonl", [{"prompt": "2 + 2 =", "completion": " four"}])
    ((ids, mask),) = learned_of(tokenizer, path, tmp_path / "cache", **pairs)
    assert tokenizer.core.decode([t for t, learned in zip(ids, mask) if learned], skip_special_tokens=False) == " four<|eos|>"
    assert tokenizer.core.decode(ids, skip_special_tokens=False) == "2 + 2 = four<|eos|>"
    table = pa.table({"prompt": [TURNS[:3]], "completion": [TURNS[3:]], "n": [1]})
    pq.write_table(table, tmp_path / "b.parquet")
    ((ids, mask),) = learned_of(tokenizer, tmp_path / "b.parquet", tmp_path / "cache", **pairs)
    said = tokenizer.core.decode([t for t, learned in zip(ids, mask) if learned], skip_special_tokens=False)
    assert said == "Good  -- <b>bye</b><|eot_id|>"


def test_tables_and_arguments_in_a_string_give_the_same_tokens(plain, tmp_path):
    family = FAMILIES["qwen"]
    tokenizer = load(folder_of(family, family.plain(), plain, tmp_path / "model"))
    written = json.loads(json.dumps(CALLS))
    for call in written[1]["tool_calls"]:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    records = [{"messages": CALLS, "tools": TOOLS}, {"messages": TURNS}]
    lines = learned_of(tokenizer, write(tmp_path / "a.jsonl", records), tmp_path / "cache")
    other = write(tmp_path / "b.jsonl", [{"messages": written, "tools": json.dumps(TOOLS)}, records[1]])
    texts = learned_of(tokenizer, other, tmp_path / "cache")
    pq.write_table(pa.table({"messages": [written, TURNS], "tools": [json.dumps(TOOLS), None]}), tmp_path / "c.parquet")
    assert lines == texts == learned_of(tokenizer, tmp_path / "c.parquet", tmp_path / "cache")


BAD = [
    ("text", "text, where a list of messages is needed"),
    ([], "an empty list, where a list of messages"),
    ([1], "message 1 is a number, where an object"),
    ([{"role": "gpt", "content": "x"}], "message 1 has the role 'gpt'; write assistant"),
    ([{"role": "asistant", "content": "x"}], "did you mean 'assistant'"),
    ([{"from": "hman", "value": "x"}], "message 1 is from 'hman'; did you mean 'human'"),
    ([{"role": "user", "content": 3}], "content is a number, where text or a list of text parts is needed"),
    ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "a part of the type 'image'; only parts of text"),
    ([TURNS[0], TURNS[1] | {"weight": 0.5}], "message 2: weight is 0.5, where 0 or 1"),
    ([TURNS[0], TURNS[1] | {"weight": 1, "train": False}], "message 2: weight and train do not say the same"),
    ([TURNS[0] | {"train": True}, TURNS[1]], "message 1, of the role user, is to be learned"),
    ([*TURNS, TURNS[0] | {"train": True}, TURNS[1]], f"message {len(TURNS) + 1}, of the role user, is to be learned"),
    ([{"role": "user"}], "message 1 has no content"),
    ([{"role": "assistant", "tool_calls": "x"}], "tool_calls is text, where a list of objects"),
    (TURNS[:1], "no message is of the role assistant"),
    ([SYSTEM, *TURNS], "System role not supported"),
    ([TURNS[0], {"role": "assistant", "content": "a\ufdd0b"}], "U\\+FDD0"),
    ([TURNS[0], {"role": "assistant", "content": "\ud800"}], "half of a surrogate pair"),
]


@pytest.mark.parametrize(("messages", "why"), BAD)
def test_a_bad_conversation_is_refused_where_it_stands(messages, why, plain, tmp_path):
    family = FAMILIES["gemma"]
    tokenizer = load(folder_of(family, family.plain(), plain, tmp_path / "model"))
    good = json.dumps({"messages": TURNS}) + "\n"
    (tmp_path / "a.jsonl").write_text(good + json.dumps({"messages": messages}) + "\n")
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2, byte {len(good)}: .*{why}"):
        learned_of(tokenizer, tmp_path / "a.jsonl", tmp_path / "cache")


@pytest.mark.parametrize(("number", "marks"), [(1, {"train": True}), (2, {"weight": 2})])
def test_messages_are_counted_as_they_stand_in_the_record(number, marks):
    """Without the message that a field `system` adds, and over prompt and completion."""
    messages = [dict(message) for message in TURNS[:2]]
    messages[number - 1] |= marks
    for values, extra in (([messages], {"system": "be kind"}), ([messages[:1], messages[1:]], {})):
        with pytest.raises(BadRecord, match=f"^message {number}"):
            render_record(values, extra, "assistant", 0.0, RecordNotes(None))


def test_templates_that_cannot_be_used(plain, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"messages": TURNS}])

    def tried(template: str, why: str, **how) -> None:
        tokenizer = load(folder_of(FAMILIES["chatml"], template, plain, tmp_path / f"{len(list(tmp_path.iterdir()))}"))
        with pytest.raises(DataError, match=why):
            learned_of(tokenizer, path, tmp_path / "cache", **how)

    tried("{% for m in messages %}{{ m.content }}", r"tokenizer_config\.json, line 1: not a chat template that can be read")
    tried("{{ messages | length }}", "writes messages before turn 2 otherwise")
    tried("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe")
    tried("{% generation %}{{ messages[0].content }}{% endgeneration %}", "all .* tokens would be learned")
    tried("{{ 'x' }}{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "writes nothing for turn 2")
    bare = folder_of(FAMILIES["chatml"], "x", plain, tmp_path / "bare")
    (bare / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    with pytest.raises(DataError, match="no chat template comes with the tokenizer"):
        learned_of(load(bare), path, tmp_path / "cache")
    (bare / "chat_template.jinja").write_text(FAMILIES["chatml"].marked())
    assert learned_of(load(bare), path, tmp_path / "cache")


def test_the_day_of_a_template_is_that_of_the_file(plain, tmp_path):
    tokenizer = load(folder_of(FAMILIES["chatml"], "{{ strftime_now('%Y') }}" + FAMILIES["chatml"].plain(), plain, tmp_path / "model"))
    path = write(tmp_path / "a.jsonl", [{"messages": TURNS}])
    os.utime(path, (0, 86400 * 400))
    ((ids, _),) = learned_of(tokenizer, path, tmp_path / "cache")
    assert tokenizer.core.decode(ids).startswith("1971")


def test_a_text_that_ends_is_not_closed_again(plain, tmp_path):
    tokenizer = load(folder_of(FAMILIES["chatml"], "", plain, tmp_path / "model"))
    rendered = "<|im_start|>user\nHi<|im_end|>\n"
    assert tokenizer.encode([rendered])[0] == tokenizer.core.encode(rendered).ids
    assert tokenizer.encode(["Hi"])[0] == [*tokenizer.core.encode("Hi").ids, tokenizer.eos]


def test_sources_are_mixed_by_epochs_and_weights(plain, tmp_path):
    tokenizer = load(folder_of(FAMILIES["chatml"], "", plain, tmp_path / "model"))
    for name, n in (("a", 6), ("b", 40)):
        write(tmp_path / f"{name}.jsonl", [{"text": f"{name} {i:03}"} for i in range(n)])

    def batches(*how: dict, seed: int = 3) -> Batches:
        sources = [TrainSource(path=str(tmp_path / f"{name}.jsonl"), **given) for name, given in zip("ab", how)]
        return Batches(build(sources, tokenizer, tmp_path / "cache"), seed, 1, 100, None, sources)

    def documents(found: Batches, n: int) -> list[str]:
        return [tokenizer.core.decode(found.at(cursor).documents[0].ids.tolist()) for cursor in range(n)]

    twice = documents(batches({"epochs": 3}, {"epochs": 0.5}), 38 * 2)
    assert [name.count("a") for name in ("".join(d[0] for d in twice[:38]), "".join(d[0] for d in twice[38:]))] == [18, 18]
    assert {d: twice.count(d) for d in twice} == {f"a {i:03}": 6 for i in range(6)} | {f"b {i:03}": 1 for i in range(40)}
    even = documents(batches({"weight": 1}, {"weight": 1}), 80)
    assert sum(d[0] == "a" for d in even) == 40
    assert documents(batches({}, {}), 46) != documents(batches({}, {}, seed=4), 46)
    assert len({batches(*how).fingerprint for how in (({}, {}), ({"epochs": 3}, {}), ({"epochs": 2}, {}))}) == 3
    assert batches({"epochs": 3}, {}).at(17).next_cursor == 18


def test_keys_that_do_not_go_together():
    for keys, why in (
        ({"path": "a", "format": {"messages": "m", "text": "t"}}, "text or messages, or names of fields"),
        ({"path": "a", "format": {"text": ""}}, "text or messages, or names of fields"),
        ({"path": "a", "format": "chat"}, "text or messages, or names of fields"),
        ({"path": "a", "format": {"prompt": "p"}}, "text or messages, or names of fields"),
        ({"path": "a", "learn": "all"}, "learn is for messages"),
        ({"path": "a", "format": {"prompt": "p", "completion": "c"}, "learn": "last"}, "learn: last is for messages"),
        ({"path": "a", "epochs": 2, "weight": 1}, "name one of epochs and weight"),
        ({"corpus": "python", "format": "messages"}, "leave it out for a corpus"),
    ):
        with pytest.raises(ValidationError, match=why):
            TrainSource(**keys)
    with pytest.raises(ValidationError, match="every source of several needs one, or none"):
        DataConfig(train=(TrainSource(path="a", weight=1), TrainSource(path="b")), max_len=8)


def test_masks_are_verified_with_the_tokens(plain, tmp_path):
    family = FAMILIES["chatml"]
    tokenizer = load(folder_of(family, family.plain(), plain, tmp_path / "model"))
    source = Source(path=str(write(tmp_path / "a.jsonl", [{"messages": TURNS}])), format=DocumentFormat("messages", ("messages",)))
    made = build([source], tokenizer, tmp_path / "cache")
    mask = np.fromfile(made.folder / "learned.bin", "u1")
    (1 - mask).astype("u1").tofile(made.folder / "learned.bin")
    with pytest.raises(DataError, match=r"learned\.bin is damaged"):
        build([source], tokenizer, tmp_path / "cache")
