"""Chat templates run in a process of their own: one that never ends or fills the memory is refused with a reason, in seconds."""

import time
from collections.abc import Iterator

import psutil
import pytest

from longshift.documents.template import Chat, ChatTemplate, UnsoundTemplate
from longshift.documents.template_process import TemplateProcess
from longshift.errors import DataError

SAID = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def of(source: str) -> ChatTemplate:
    return ChatTemplate(source, "t.jinja", (("bos_token", "<s>"),), ("<end>", "<s>"))


@pytest.fixture
def started() -> Iterator[list[TemplateProcess]]:
    """Processes that a test starts, to be ended after it."""
    found: list[TemplateProcess] = []
    yield found
    for process in found:
        process.close()


@pytest.mark.parametrize(
    "chat",
    [
        Chat(SAID),
        Chat([*SAID, {"role": "user", "content": "\ud800 \u2028 \x00 ä"}, {"role": "assistant", "content": "ß\n"}], day=1e9),
        Chat(SAID, tools=[{"name": "f", "parameters": {"x": None}}], variables={"enable_thinking": True}, learned=(None, True)),
    ],
    ids=["plain", "other letters", "tools"],
)
def test_a_process_renders_what_the_template_does(started, chat):
    template = of(PLAIN + "{{ tools }}{{ enable_thinking }}")
    started.append(process := TemplateProcess(template))
    for learn in ("assistant", "last", "all"):
        assert process.render(chat, learn) == template.render(chat, learn)
    assert process.write(chat) == template.write(chat)
    assert process.variables == set(template.list_variables())


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "loops in loops",
        ),
        ("{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else '' }}{% endmacro %}{{ f(60) }}", "computes for more than 0.5 s"),
        (
            "{% set n = namespace(t='xx') %}{% for i in range(99) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
            "computes|memory",
        ),
        ("{{ 'x' * 10000000000 }}", "memory"),
        ("{{ 'x'.ljust(10000000000) }}", "memory"),
        ("{{ 'x' | center(10000000000) }}", "memory"),
        (
            "{% set n = namespace(t=[1]) %}{% for i in range(99) %}{% set n.t = n.t + n.t %}{% endfor %}",
            "computes|memory",
        ),
        ("{{ 7 ** 9999999999 }}", "computes|memory"),
    ],
    ids=["loops", "macro", "doubled", "times", "ljust", "center", "lists", "power"],
)
def test_a_template_that_takes_too_much_is_refused(started, source, why):
    started.append(process := TemplateProcess(of(source + PLAIN), deadline_s=0.5, most_bytes=512 << 20))
    began = time.monotonic()
    with pytest.raises(UnsoundTemplate, match=why) as caught:
        process.render(Chat(SAID), "assistant")
    assert time.monotonic() - began < 60
    assert len(str(caught.value)) < 400


def test_a_deadline_is_of_each_rendering(started):
    """Of a conversation of many turns, which is rendered twice for each, and of the sample that says where a turn ends."""
    loop = "{% for a in range(99999) %}{% endfor %}{% for a in range(99999) %}{% endfor %}{% for a in range(99999) %}{% endfor %}"
    started.append(process := TemplateProcess(of(loop + PLAIN), deadline_s=0.5))
    assert len(process.render(Chat(SAID * 60), "assistant").learned) == 60
    assert process.turn_end() == of(PLAIN).turn_end() == "<end>"
    started.append(endless := TemplateProcess(of("{% for a in range(99999) %}" + loop + "{% endfor %}" + PLAIN), deadline_s=0.5))
    assert endless.turn_end() is None


def test_after_a_refusal_the_next_conversation_has_a_process_again(started):
    template = of("{% if messages|length > 2 %}{{ 'x' * 10000000000 }}{% endif %}" + PLAIN)
    started.append(process := TemplateProcess(template, most_bytes=512 << 20))
    with pytest.raises(UnsoundTemplate, match="memory"):
        process.render(Chat([*SAID, *SAID]), "assistant")
    assert process.render(Chat(SAID), "assistant").text == "<user>Hi<end><assistant>Hello<end>"


def test_a_template_that_cannot_be_read_is_a_fault_of_its_file(started):
    started.append(process := TemplateProcess(of("{% for %}")))
    with pytest.raises(DataError, match=r"t\.jinja, line 1: not a chat template that can be read"):
        process.render(Chat(SAID), "assistant")


def test_no_process_is_left():
    with TemplateProcess(of(PLAIN)) as process:
        process.write(Chat(SAID))
        assert [child for child in psutil.Process().children() if "template_process" in " ".join(child.cmdline())]
    assert not [child for child in psutil.Process().children() if "template_process" in " ".join(child.cmdline())]
