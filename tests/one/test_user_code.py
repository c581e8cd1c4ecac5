"""Objects that a config names: found in the working directory, or refused in a line that says what to do. Documents that a function
returns are tokens as those of a file are, or are refused with their number."""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from longshift.config_file import parse_config
from longshift.config_parts import DataConfig, Source, TrainSource
from longshift.documents.tokenizer import Tokenizer, load
from longshift.documents.tokenizer import train as train_tokenizer
from longshift.documents.tokens import TokenCache, build
from longshift.errors import DataError, UsageError
from longshift.user_code import load_object, split_object

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
TURNS = [
    {"role": "user", "content": "Is it json?"},
    {"role": "assistant", "content": "It is."},
    {"role": "user", "content": "Are you sure?"},
    {"role": "assistant", "content": "I am sure."},
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, whose modules no other test sees."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_an_object_is_found_where_longshift_was_started_in_a_package_and_in_what_is_installed(folder):
    (folder / "hooks.py").write_text("print('loud')\nvalue = 5\n")
    (folder / "pack").mkdir()
    (folder / "pack/__init__.py").write_text("")
    (folder / "pack/inner.py").write_text("import hooks\nvalue = hooks.value + 1\n")
    assert load_object("hooks:value", "train.on_step") == 5
    assert load_object("pack.inner:value", "train.on_step") == 6
    assert load_object("json:loads", "train.on_step") is json.loads


def test_what_a_module_prints_is_not_on_standard_output(folder, capsys):
    (folder / "hooks.py").write_text("print('loud')\nvalue = 5\n")
    load_object("hooks:value", "train.on_step")
    assert capsys.readouterr() == ("", "loud\n")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hooks.watch", "'hooks.watch' has no colon: write a module and a name in it, as in my_module:watch"),
        ("hooks.py:watch", "'hooks.py:watch' names a file: write its module as Python imports it, as in hooks:watch"),
        ("src/hooks:watch", "'src/hooks:watch' names a file: write its module as Python imports it, as in hooks:watch"),
        ("hooks:", "'hooks:' is no module and a name in it, as in my_module:name"),
        ("hooks:a.b", "'hooks:a.b' is no module and a name in it"),
        (":watch", "':watch' is no module and a name in it"),
        (
            "nowhere.at_all:watch",
            "nowhere.at_all:watch: there is no module nowhere.at_all in FOLDER, where longshift was started, nor among installed packages; "
            "start longshift in the folder that holds nowhere, or install its package",
        ),
        ("hooks.inner:watch", "there is no module hooks.inner in FOLDER"),  # hooks is no package
        ("hooks:wach", "hooks:wach: hooks has no wach; did you mean 'watch'? (FOLDER/hooks.py)"),
        ("fails:watch", "fails:watch: fails raised while it was imported: ZeroDivisionError: division by zero (FOLDER/fails.py, line 3)"),
        ("lacks:watch", "lacks raised while it was imported: ModuleNotFoundError: No module named 'not_here' (FOLDER/lacks.py, line 1)"),
        ("ends:watch", "ends raised while it was imported: SystemExit: 3 (FOLDER/ends.py, line 2)"),
        ("wrong:watch", "wrong raised while it was imported: SyntaxError: invalid syntax (wrong.py, line 2)"),
        ("torn.inner:watch", "torn.inner raised while it was imported: ModuleNotFoundError: No module named 'not_here'"),
        ("sealed.inner:watch", "sealed.inner raised while it was imported: ValueError: sealed"),
    ],
)
def test_each_fault_of_a_name_is_one_line_that_says_why(folder, text, why):
    (folder / "hooks.py").write_text("def watch(metrics, control): ...\n")
    (folder / "fails.py").write_text("def watch(): ...\n\n1 / 0\n")
    (folder / "lacks.py").write_text("import not_here\n")
    (folder / "ends.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "wrong.py").write_text("def watch(): ...\nit was wrong\n")
    (folder / "sealed").mkdir()
    (folder / "sealed/__init__.py").write_text("raise ValueError('sealed\\nand more')\n")
    (folder / "sealed/inner.py").write_text("")
    (folder / "torn").mkdir()
    (folder / "torn/__init__.py").write_text("import not_here\n")
    with pytest.raises(UsageError) as told:
        load_object(text, "train.on_step")
    assert "\n" not in str(told.value)
    assert str(told.value).startswith("train.on_step: ")
    assert why.replace("FOLDER", str(folder)) in str(told.value)


@pytest.mark.parametrize("text", ["hooks:watch", "a.b.c:D"])
def test_a_name_is_split(text):
    assert split_object(text) == tuple(text.split(":"))


CONFIG = "model: {preset: tiny-llama}\ndata: {train: [{corpus: python}], max_len: 1K}\ntrain: {tokens_per_step: 1K, steps: 1, lr: 1}\n"


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("train.on_step=watch", "train.on_step: 'watch' has no colon: write a module and a name in it, as in my_module:watch"),
        ("data.train=[{python: watch}]", "data.train.0.python: 'watch' has no colon"),
        ("save.trackers=[hooks.py:Mine]", "save.trackers.0: 'hooks.py:Mine' names a file"),
        (
            "save.trackers=[Mine]",
            "save.trackers.0: 'Mine' is not one of tensorboard, wandb, trackio, mlflow, nor package.module:name of your own code",
        ),
    ],
)
def test_a_config_refuses_what_names_no_object(override, why):
    with pytest.raises(UsageError, match=re.escape(why)):
        parse_config(CONFIG + "save: {dir: run}\n", [override])


# Documents


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    train_tokenizer(iter([Path(json.__file__).read_text()]), 300).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return load(folder / "tokenizer.json")


def documents(folder: Path, body: str, tokenizer: Tokenizer, learn: str = "assistant") -> TokenCache:
    """The tokens of a function with this body, in a module of a new name."""
    name = f"docs_{time.monotonic_ns()}"
    (folder / f"{name}.py").write_text(f"import datetime, json, numpy as np\ndef documents():\n    {body}\n")
    return build([Source(python=f"{name}:documents", learn=learn)], tokenizer, folder / "cache")


def test_texts_are_the_tokens_of_a_file(folder, tokenizer):
    rows = ["Once upon a time", "  there was JSON\n"]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    of_file = build([Source(path=str(folder / "rows.jsonl"))], tokenizer, folder / "cache")
    for body in (f"return {rows!r}", f"yield from ({{'text': row, 'id': 1}} for row in {rows!r})"):
        made = documents(folder, body, tokenizer)
        assert made.fingerprint == of_file.fingerprint
        assert made.learned(0) is None
        assert not (made.folder / "learned.bin").exists()
    assert made.where(1).endswith(":documents, item 2")
    assert made.notes == (f"{made.files[0].path}: 2 times not read: id",) or "id" in made.notes[0]


@pytest.mark.parametrize("learn", ["assistant", "last", "all"])
def test_messages_are_the_tokens_of_a_file_and_so_is_what_is_learned(folder, tokenizer, learn):
    (folder / "rows.jsonl").write_text(json.dumps({"messages": TURNS, "system": "Be brief."}) + "\n")
    of_file = build([Source(path=str(folder / "rows.jsonl"), format="messages", learn=learn)], tokenizer, folder / "cache")
    made = documents(folder, f"return [{{'messages': tuple({TURNS!r}), 'system': 'Be brief.'}}]", tokenizer, learn)
    assert made.fingerprint == of_file.fingerprint
    assert made.learned_tokens == of_file.learned_tokens
    assert (made.learned_tokens == int(made.lengths.sum())) == (learn == "all")


def test_ids_are_taken_as_they_are_and_labels_say_what_is_learned(folder, tokenizer):
    masked = "{'ids': np.array([5, 17, 9], 'u2'), 'labels': (-100, -100, 9)}"
    body = f"return ['text', {{'ids': [5, 17, 2]}}, {masked}, {{'ids': [7, 8], 'labels': [7, 8]}}]"
    made = documents(folder, body, tokenizer)
    assert [made.tokens(n).tolist() for n in (1, 2, 3)] == [[5, 17, 2], [5, 17, 9], [7, 8]]
    learned = [made.learned(n).tolist() for n in range(4)]
    assert learned[1:] == [[1, 1, 1], [0, 0, 1], [1, 1]]
    assert all(learned[0])


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return None", "NAME:documents returned None, where an iterable of documents is needed, each a text, {'text': ...}, "),
        ("return 'one long text'", "NAME:documents returned 'one long text', where an iterable of documents is needed"),
        ("return []", "NAME:documents returned no document"),
        ("return ['a', 5]", "NAME:documents, item 2: 5 is no document, where a text, {'text': ...}, {'messages': [...]} or {'ids': "),
        ("return ['a', {'body': 'b'}]", "NAME:documents, item 2: {'body': 'b'} is no document"),
        ("return [{'text': 'a', 'ids': [1, 2]}]", "item 1: {'text': 'a', 'ids': [1, 2]} is no document"),
        ("return ['a', '']", "item 2: 'text' is empty"),
        ("return [{'text': 5}]", "item 1: 'text' holds int, where a string is needed"),
        ("return ['\\ud800']", "item 1: character 0 of 'text' is half of a surrogate pair"),
        ("return [{'messages': 'hello'}]", "item 1: 'messages': text, where a list of messages is needed"),
        ("return [{'messages': [{'role': 'robot', 'content': 'x'}]}]", "item 1: 'messages': message 1 has the role 'robot'"),
        ("return [{'messages': [{'role': 'user', 'content': datetime.date(2020, 1, 1)}]}]", "item 1: messages hold what JSON cannot: "),
        ("return [{'ids': [1]}]", "item 1: ids has 1 tokens, and a document has at least two"),
        ("return [{'ids': [1, 300]}]", "item 1: ids has 300, and tokens of FOLDER/tokenizer.json are 0 to 299"),
        ("return [{'ids': [1, -1]}]", "item 1: ids has -1, and tokens of"),
        ("return [{'ids': [1, 2.5]}]", "item 1: ids is [1, 2.5], where a row of integers is needed"),
        ("return [{'ids': [[1, 2], [3]]}]", "item 1: ids is [[1, 2], [3]], where a row of integers is needed"),
        ("return [{'ids': [1, 2], 'labels': [2]}]", "item 1: ids has 2 tokens and labels has 1, where each token has a label"),
        (
            "return [{'ids': [1, 2, 3], 'labels': [2, 3, -100]}]",
            "item 1: labels[0] is 2 and ids[0] is 1: a label is the id at its own place",
        ),
        ("return [{'ids': [1, 2], 'attention_mask': [1, 1]}]", "item 1: beside ids there is attention_mask, where labels may be"),
        ("return [{'ids': [1, 2], 'labels': [1, -100]}]", "NAME:documents: not one of 1 tokens would be learned"),
        ("yield 'a'\n    json.loads('{')", "NAME:documents, item 2: the function raised JSONDecodeError: Expecting property name"),
        ("1 / 0", "NAME:documents: the function raised ZeroDivisionError: division by zero (FOLDER/NAME.py, line 3)"),
        ("yield 'a'\n    raise SystemExit(3)", "NAME:documents, item 2: the function raised SystemExit: 3"),
    ],
)
def test_a_bad_item_is_refused_with_its_number(folder, tokenizer, body, why):
    with pytest.raises(DataError) as told:
        documents(folder, body, tokenizer)
    (module,) = folder.glob("docs_*.py")
    assert why.replace("NAME", module.stem).replace("FOLDER", str(folder)) in str(told.value)
    assert "\n" not in str(told.value)
    assert not [path for path in (folder / "cache").glob("*") if path.is_dir()]


def test_conversations_need_a_template_and_texts_do_not(folder, tokenizer):
    (folder / "chat_template.jinja").unlink()
    assert len(documents(folder, "return ['a']", tokenizer)) == 1
    with pytest.raises(DataError, match=r"item 1: 'messages': messages need a chat template, .*; write data\.template: FILE"):
        documents(folder, f"return [{{'messages': {TURNS!r}}}]", tokenizer)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("documents = ['a']", "is ['a'], where a function without arguments is needed"),
        ("def documents(path): return ['a']", "the function raised TypeError: documents() missing 1 required positional argument: 'path'"),
    ],
)
def test_what_is_no_function_without_arguments_is_refused(folder, tokenizer, module, why):
    (folder / "other.py").write_text(module)
    with pytest.raises(DataError, match=re.escape(why)):
        build([Source(python="other:documents")], tokenizer, folder / "cache")


def test_a_module_without_a_source_file_is_refused(folder, tokenizer):
    with pytest.raises(UsageError, match="data: python: sys:path: sys has no source file"):
        build([Source(python="sys:path")], tokenizer, folder / "cache")


def test_a_function_is_called_once_and_again_when_its_module_changes(folder, tokenizer):
    source = Source(python="counted:documents")
    body = "import pathlib\ndef documents():\n    pathlib.Path('calls').open('a').write('x')\n    print('aside')\n    return ['{word}']\n"
    file = folder / "counted.py"
    file.write_text(body.format(word="one"))
    first = build([source], tokenizer, folder / "cache")
    assert build([source], tokenizer, folder / "cache").folder == first.folder
    assert (folder / "calls").read_text() == "x"

    # A process that has the old module must not keep its documents under the new digest.
    file.write_text(body.format(word="two, of another length"))
    with pytest.raises(DataError, match="counted:documents: the module has changed since this process imported it; start Python anew"):
        build([source], tokenizer, folder / "cache")
    del sys.modules["counted"]
    second = build([source], tokenizer, folder / "cache")
    assert second.folder != first.folder
    assert second.lengths[0] > first.lengths[0]
    assert (folder / "calls").read_text() == "xx"

    # Contents count, not times alone.
    stat = file.stat()
    file.write_text(body.format(word="two, of other contents"[:22]))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    del sys.modules["counted"]
    assert build([source], tokenizer, folder / "cache").folder != second.folder


def test_a_module_that_changes_while_it_is_read_is_refused(folder, tokenizer):
    with pytest.raises(DataError, match=r"changed while it was read"):
        documents(folder, "yield 'a'\n    open(__file__, 'a').write('# more')\n    yield 'b'", tokenizer)


def test_keys_beside_a_function():
    assert TrainSource(python="a:b", weight=1, learn="last").name == "a:b"
    for keys, why in (
        ({"python": "a:b", "path": "c"}, "name exactly one of path, corpus and python"),
        ({"python": "a:b", "format": "messages"}, "leave it out for a corpus, and for a function"),
        ({"path": "a", "learn": "last"}, "learn is for messages"),
    ):
        with pytest.raises(ValidationError, match=why):
            TrainSource(**keys)
    valid = DataConfig(train=(TrainSource(python="a:b"),), valid=(Source(python="a:c"),), max_len=8).valid
    assert valid is not None
    assert valid[0].python == "a:c"
