"""Every field of a record reaches the tokens or the mask, or is named once with what happens to it."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import FAMILIES, THINKING
from test_chat import CALLS, SYSTEM, TOOLS, TURNS, folder_of, plain, write  # noqa: F401  (plain: a fixture)

from longshift.config_parts import DocumentFormat, Source
from longshift.documents.template_process import TemplateProcess
from longshift.documents.tokenizer import Tokenizer, load
from longshift.documents.tokens import TokenCache, build
from longshift.errors import DataError
from longshift.trainer import corpus


class Chats:
    """Builds caches of records under a family's template, and says what is learned."""

    def __init__(self, plain, folder: Path):  # noqa: F811
        self.plain, self.folder, self.number = plain, folder, 0

    def build(self, records: list[dict], family: str = "qwen", template: str | None = None, **source) -> tuple[Tokenizer, TokenCache]:
        self.number += 1
        model = folder_of(FAMILIES[family], template or FAMILIES[family].plain(), self.plain, self.folder / f"model{self.number}")
        path = write(self.folder / f"chats{self.number}.jsonl", records)
        tokenizer = load(model)
        given = {"path": str(path)} | ({"format": "messages"} | source)
        return tokenizer, build([Source(**given)], tokenizer, self.folder / "cache")

    def show(self, *how, **more) -> tuple[str, str, str]:
        """The first document, what of it is learned, and the notes."""
        tokenizer, cache = self.build(*how, **more)
        ids, mask = cache.tokens(0).tolist(), cache.learned(0)
        said = [token for token, learned in zip(ids, mask if mask is not None else ids) if learned]
        return *(tokenizer.core.decode(part, skip_special_tokens=False) for part in (ids, said)), "\n".join(cache.notes)


@pytest.fixture
def chats(plain, tmp_path) -> Chats:  # noqa: F811
    return Chats(plain, tmp_path)


@pytest.mark.parametrize("marked", [True, False], ids=["markers", "prefixes"])
@pytest.mark.parametrize(("key", "value"), [("weight", 0), ("weight", 0.0), ("train", False), ("training", False), ("loss", 0)])
def test_a_turn_that_is_marked_as_not_to_learn_is_not_learned(chats, key, value, marked):
    first = [TURNS[0], TURNS[1] | {key: value}, *TURNS[2:]]
    template = FAMILIES["qwen"].marked() if marked else FAMILIES["qwen"].plain()
    text, said, notes = chats.show([{"messages": first}], template=template)
    assert said == TURNS[3]["content"] + "<|im_end|>"
    assert TURNS[1]["content"] in text
    assert not notes
    _, said, _ = chats.show([{"messages": first}], template=template, learn="all")
    assert TURNS[1]["content"] not in said
    assert TURNS[0]["content"] in said
    last = [*TURNS[:3], TURNS[3] | {key: value}]
    _, said, _ = chats.show([{"messages": last}], template=template)
    assert said == TURNS[1]["content"] + "<|im_end|>"
    with pytest.raises(DataError, match=r"not one of .* tokens would be learned"):
        chats.show([{"messages": last}], template=template, learn="last")


def test_conversations_of_which_nothing_is_learned_are_counted(chats):
    silent = [TURNS[0], TURNS[1] | {"weight": 0}]
    _, _, notes = chats.show([{"messages": silent}, {"messages": TURNS}])
    assert notes.endswith("nothing is learned of: conversations whose turns are all marked as not to learn (1)")


def test_the_last_turn_is_the_last_whatever_its_marked_spans(chats):
    """A template that marks a thought and an answer by themselves: both are of the last turn."""
    twice = FAMILIES["chatml"].template.replace(
        "<<{{ m.content + '<|im_end|>' }}>>", "<<{{ m.thought }}>>{{ '|' }}<<{{ m.content + '<|im_end|>' }}>>"
    )
    template = twice.replace("<<", "{% generation %}").replace(">>", "{% endgeneration %}")
    messages = [TURNS[0], TURNS[1] | {"thought": "first"}, TURNS[2], TURNS[3] | {"thought": "second"}]
    _, said, _ = chats.show([{"messages": messages}], family="chatml", template=template, learn="last")
    assert said == "second" + TURNS[3]["content"] + "<|im_end|>"
    unmarked = template.replace("{% if m.role == 'assistant' %}", "{% if m.role == 'assistant' and m.thought == 'first' %}")
    with pytest.raises(DataError, match="marks nothing in turn 4"):
        chats.show([{"messages": messages}], family="chatml", template=unmarked, learn="last")


@pytest.mark.parametrize("family", ["qwen", "llama3", "chatml"])
def test_a_system_prompt_of_its_own_is_the_first_message(chats, family):
    own = chats.show([{"messages": TURNS, "system": "Be brief."}], family=family)
    assert own == chats.show([{"messages": [SYSTEM, *TURNS]}], family=family)
    assert own == chats.show([{"messages": [SYSTEM, *TURNS], "system": "Be brief."}], family=family)
    with pytest.raises(DataError, match="a field system and a message of the role system, and they differ"):
        chats.show([{"messages": [SYSTEM, *TURNS], "system": "Be long."}], family=family)


def test_variables_and_documents_reach_the_template(chats):
    template = (
        FAMILIES["chatml"].plain().replace("{%- for m in", "{{ mood }}{% for d in documents or [] %}{{ d.text }}{% endfor %}{%- for m in")
    )
    extra = {"chat_template_kwargs": {"mood": "calm", "tone": "low"}, "documents": [{"text": "a source of it"}]}
    text, _, notes = chats.show([{"messages": TURNS} | extra], family="chatml", template=template)
    assert text.startswith("calma source of it<|im_start|>")
    assert notes.endswith("not written by the chat template: tone (1)")
    with pytest.raises(DataError, match="chat_template_kwargs has messages, which the record or the trainer sets"):
        chats.show([{"messages": TURNS, "chat_template_kwargs": {"messages": []}}])


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"reasoning_content": "first two, then two more"}, "reasoning_content of assistant messages (2)"),
        ({"name": "Ada"}, "name of assistant messages (2)"),
        ({"id": 7}, "id of assistant messages (2)"),
        (
            {"refusal": True, "audio": {"transcript": "some words that are spoken"}},
            "audio.transcript of assistant messages (2), refusal of",
        ),
    ],
)
def test_what_the_template_does_not_write_is_named(chats, message, field):
    answers = [TURNS[0], TURNS[1] | message]
    _, _, notes = chats.show([{"messages": answers}, {"messages": answers}])
    assert f"not written by the chat template: {field}" in notes


def test_thoughts_that_a_template_drops_from_contents_are_named(chats):
    template = FAMILIES["chatml"].template.replace("<<{{ m.content", "<<{{ m.content.split('</think>')[-1]")
    marked = template.replace("<<", "{% generation %}").replace(">>", "{% endgeneration %}")
    answer = {"role": "assistant", "content": "<think>two and two make</think>four of them"}
    _, said, notes = chats.show([{"messages": [TURNS[0], answer]}], family="chatml", template=marked)
    assert said == "four of them<|im_end|>"
    assert "content of assistant messages (1)" in notes
    _, said, notes = chats.show([{"messages": [TURNS[0], answer]}], family="chatml", template=FAMILIES["chatml"].marked())
    assert said == answer["content"] + "<|im_end|>"
    assert not notes
    _, said, notes = chats.show([{"messages": TURNS[:2]}], family="chatml", template=THINKING)  # adds, and drops nothing
    assert not notes


def test_tools_that_a_template_leaves_out_are_named_and_what_it_writes_is_not(chats):
    _, _, notes = chats.show([{"messages": CALLS, "tools": TOOLS}])
    assert notes.endswith("not written by the chat template: tool_calls.type of assistant messages (1)")
    _, _, notes = chats.show([{"messages": TURNS, "tools": TOOLS}], family="chatml")
    assert "function.name of tools (1)" in notes
    assert "function.parameters of tools (1)" in notes


def test_fields_beside_a_text_or_messages_that_no_one_reads_are_named(chats, tmp_path, plain):  # noqa: F811
    _, _, notes = chats.show([{"messages": TURNS, "source": "web", "score": 3}, {"messages": TURNS, "source": "book"}])
    assert notes.endswith("not read: score (1), source (2)")
    pairs = {"format": {"prompt": "prompt", "completion": "completion"}}
    _, _, notes = chats.show([{"prompt": "2 + 2 =", "completion": " 4", "system": "Count.", "id": 1}], **pairs)
    assert notes.endswith("not read: id (1), system (1)")
    pq.write_table(pa.table({"text": ["one", "two"], "url": ["a", "b"]}), tmp_path / "t.parquet")
    tokenizer = load(folder_of(FAMILIES["qwen"], "", plain, tmp_path / "table"))
    cache = build([Source(path=str(tmp_path / "t.parquet"))], tokenizer, tmp_path / "cache")
    assert cache.notes == (f"{tmp_path}/t.parquet: not read: url (2)",)


def test_nulls_inside_arguments_are_written_and_those_of_tables_are_not_there(chats, tmp_path):
    def calls(arguments) -> list[dict]:
        call = {"id": None, "function": {"name": "find", "arguments": arguments}}
        return [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "no"}, TURNS[3]]

    arguments = {"place": None, "days": [None, 2]}
    text, _, notes = chats.show([{"messages": calls(arguments)}])
    assert json.dumps(arguments) in text
    assert text == chats.show([{"messages": calls(json.dumps(arguments))}])[0]
    assert not notes
    pq.write_table(pa.table({"messages": [calls({"a": "x", "b": None})], "tools": [None]}), tmp_path / "t.parquet")
    tokenizer, _ = chats.build([{"messages": TURNS}])
    cache = build(
        [Source(path=str(tmp_path / "t.parquet"), format=DocumentFormat("messages", ("messages",)))], tokenizer, tmp_path / "cache"
    )
    assert '{"a": "x"}' in tokenizer.core.decode(cache.tokens(0).tolist())


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "Wie heißt du? "}, {"type": "text", "text": "漢字 🙂"}], "Wie heißt du? 漢字 🙂"),
        (["Wie heißt du? 漢字 🙂"], "Wie heißt du? 漢字 🙂"),
        ([{"text": "Wie heißt du? 漢字 🙂"}], "Wie heißt du? 漢字 🙂"),
        ([], ""),
    ],
)
def test_text_parts_are_one_text(chats, content, text):
    parts = [{"role": "user", "content": content}, *TURNS[1:]]
    assert chats.show([{"messages": parts}]) == chats.show([{"messages": [{"role": "user", "content": text}, *TURNS[1:]]}])


def test_conversations_of_sharegpt_are_read(chats):
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    other = [{"from": names[message["role"]], "value": message["content"]} for message in [SYSTEM, *TURNS]]
    assert (
        chats.show([{"conversations": other}], format={"messages": "conversations"})[:2] == chats.show([{"messages": [SYSTEM, *TURNS]}])[:2]
    )
    ends = [*other[:2], {"from": "gpt", "value": "x", "weight": 0}, *other[3:]]
    assert chats.show([{"conversations": ends}], format={"messages": "conversations"})[1] == TURNS[3]["content"] + "<|im_end|>"


def test_a_template_that_writes_more_at_the_end_is_read(chats):
    """Its prompt differs from what it writes before an answer, so that the turn is where its content stands."""
    template = FAMILIES["chatml"].plain().replace("{%- if add_generation_prompt", "{{ '<!-- end -->' }}{%- if add_generation_prompt")
    text, said, _ = chats.show([{"messages": TURNS}], family="chatml", template=template)
    assert text.endswith("<!-- end --><|eos|>") or text.endswith("<!-- end --><|im_end|>")
    assert said.startswith("".join(turn["content"] + "<|im_end|>" for turn in TURNS if turn["role"] == "assistant"))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("tojson(true)", '"n\\u00e9"'),
        ("tojson(ensure_ascii=True)", '"n\\u00e9"'),
        ("tojson", '"né"'),
        ("tojson(false, 2)", '"né"'),
        ("tojson(indent=1, separators=(',', ':'), sort_keys=true)", '"né"'),
    ],
)
def test_tojson_takes_the_arguments_of_transformers(chats, call, text):
    template = FAMILIES["chatml"].plain().replace("m.content", f"(m.content | {call})")
    assert text in chats.show([{"messages": [{"role": "user", "content": "né"}, TURNS[1]]}], family="chatml", template=template)[0]


def test_answers_that_truncate_cuts_away_whole_are_named(chats, monkeypatch):
    long = [{"role": "user", "content": "x" * 200}, TURNS[1]]
    _, cache = chats.build([{"messages": long}, {"messages": TURNS[:2] * 9}, {"messages": TURNS}])

    class Cut:
        class data:
            max_len, overlong = 64, "truncate"

    (note,) = corpus.corpus_notes(Cut, cache)  # pyright: ignore[reportArgumentType]
    assert note.startswith("overlong: truncate cuts all that is learned off 1 documents")
    Cut.data.max_len = 1000
    assert corpus.corpus_notes(Cut, cache) == []  # pyright: ignore[reportArgumentType]


def test_a_template_is_asked_of_so_many_fields_only(chats, monkeypatch):
    """Each asks for a rendering of the conversation: thousands of names would take minutes."""
    renderings = 0
    native = TemplateProcess.write

    def write_counted(*given):
        nonlocal renderings
        renderings += 1
        return native(*given)

    monkeypatch.setattr(TemplateProcess, "write", write_counted)
    turns = [TURNS[0], TURNS[1] | {f"field{number}": number for number in range(3000)}]
    notes = chats.show([{"messages": turns}])[2]
    assert renderings < 220
    assert "field0 of assistant messages (1)" in notes
    assert "field199 of assistant messages (1)" in notes
    assert "as there are too many names to ask it of each: fields of assistant messages (1)" in notes
