"""Records of conversations, and of prompts with completions, to documents of which a part is learned.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "tools": [...]}
    {"prompt": "2 + 2 =", "completion": " 4"}       or a list of messages each

`tools` is what the template tells the model of functions that it may call, where a record has it. Arguments of calls may be objects, or
JSON in a string, as OpenAI writes them: templates get objects. A field that is null, as tables have it, is a field that is not there.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from longshift.config_parts import Learn
from longshift.documents.template import ChatTemplate, Rendered, UnsoundTemplate, check_unmarked
from longshift.errors import did_you_mean

TOOLS = "tools"
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


class BadRecord(Exception):
    """A record that is no conversation; the message says why."""


def conversation(messages: object, tools: object, template: ChatTemplate, learn: Learn, day: float) -> Rendered:
    """The document of a list of messages. Raises BadRecord."""
    found, tools = _messages(messages), _parsed(_present(tools))
    if learn != "all" and not any(message["role"] == "assistant" for message in found):
        raise BadRecord("no message is of the role assistant, so there is nothing to learn")
    return _rendered(template, found, tools, learn, day)


def completed(prompt: object, completion: object, tools: object, template: ChatTemplate | None, learn: Learn, day: float) -> Rendered:
    """The document of a prompt and its completion, both text or both messages; the completion is learned. Raises BadRecord."""
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise BadRecord("the completion is empty, so there is nothing to learn")
        start = 0 if learn == "all" else len(prompt)
        return Rendered(prompt + completion, ((start, len(prompt) + len(completion)),))
    if isinstance(prompt, str) or isinstance(completion, str):
        raise BadRecord(f"prompt and completion are both text or both lists of messages, not {_kind(prompt)} and {_kind(completion)}")
    if template is None:
        raise BadRecord("messages need a chat template, and none comes with the tokenizer; write data.template: FILE")
    before, after = _messages(prompt), _messages(completion)
    if [message["role"] for message in after] != ["assistant"]:
        raise BadRecord("a completion of messages is one message of the role assistant; write longer ones as messages")
    return _rendered(template, before + after, _parsed(_present(tools)), "all" if learn == "all" else "last", day)


def _rendered(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: object, learn: Learn, day: float) -> Rendered:
    try:
        check_unmarked([messages, tools])
        return template.render(messages, tools, learn, day)
    except UnsoundTemplate as fault:
        raise BadRecord(str(fault)) from None


def _messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise BadRecord(f"{_kind(value)}, where a list of messages is needed")
    return [_message(entry, number) for number, entry in enumerate(value, 1)]


def _message(entry: object, number: int) -> dict[str, Any]:
    which = f"message {number}"
    if not isinstance(entry, dict):
        raise BadRecord(f"{which} is {_kind(entry)}, where an object with role and content is needed")
    message = _present(entry)
    role, content = message.get("role"), message.get("content", "")
    if "from" in message and role is None:
        raise BadRecord(f"{which} has from and value, where role and content are needed")
    if role not in _ROLES:
        other = _OTHER_ROLES.get(role) if isinstance(role, str) else None
        hint = f"; write {other}" if other else did_you_mean(str(role), _ROLES)
        raise BadRecord(f"{which} has the role {role!r}{hint}")
    if not isinstance(content, str):
        raise BadRecord(f"{which}: content is {_kind(content)}, where text is needed; images and sounds are not for these models")
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRecord(f"{which}: tool_calls is {_kind(calls)}, where a list of objects is needed")
    if "content" not in message and not calls:
        raise BadRecord(f"{which} has no content")
    return message | {"content": content} | ({"tool_calls": [_call(call) for call in calls]} if calls else {})


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object."""
    function = call.get("function")
    if isinstance(function, dict):
        return {**call, "function": _call(function)}
    return {**call, "arguments": _parsed(call["arguments"])} if "arguments" in call else dict(call)


def _parsed(value: object) -> object:
    """What a string of JSON holds; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _present(value: object) -> Any:
    """A value without the fields that are null."""
    if isinstance(value, dict):
        return {name: _present(entry) for name, entry in value.items() if entry is not None}
    return [_present(entry) for entry in value] if isinstance(value, list) else value


def _kind(value: object) -> str:
    names = {str: "text", list: "a list", dict: "an object", type(None): "null", bool: "true or false", int: "a number", float: "a number"}
    return "an empty list" if value == [] else names.get(type(value), type(value).__name__)
