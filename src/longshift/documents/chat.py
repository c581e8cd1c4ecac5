"""Records of conversations, and of prompts with completions,
to documents of which a part is learned.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
     "tools": [...]}
    {"prompt": "2 + 2 =", "completion": " 4"}       or a list of messages each

Beside messages a record may have `tools`, `documents` and `chat_template_kwargs` for the template,
and `system`, a first message. A message with `weight` 0, or `train`, `training` or `loss` false, is
not learned. Content may be a list of text parts; messages may have `from` and `value`, as ShareGPT
writes them. Arguments of calls may be objects, or JSON in a string, as OpenAI writes them:
templates get objects. A field of a message that is null is a field that is not there. What else a
record holds is counted in `RecordNotes`, unless the template writes it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from longshift.config_parts import Learn
from longshift.documents.record_notes import UNLEARNED, UNREAD, RecordNotes
from longshift.documents.template import Chat, RenderedConversation, UnsoundTemplate, check_unmarked
from longshift.errors import did_you_mean

# Fields beside messages that are read where a record has them.
OPTIONAL = ("tools", "system", "chat_template_kwargs", "documents")
# Fields of a message that say whether it is learned.
LEARNED = ("weight", "train", "training", "loss")
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_ROLE_ALIASES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
_SHAREGPT_ROLES = (
    {name: name for name in _ROLES}
    | _ROLE_ALIASES
    | {"observation": "tool", "chatgpt": "assistant"}
)
_RESERVED_VARIABLES = (
    "messages",
    "tools",
    "add_generation_prompt",
    "strftime_now",
    "raise_exception",
)


class BadRecord(Exception):
    """A record that is no conversation; the message says why."""


def render_record(
    values: Sequence[object],
    extra: Mapping[str, Any],
    learn: Learn,
    day: float,
    notes: RecordNotes,
) -> RenderedConversation:
    """The document of a list of messages, or of a prompt and its completion, which are both text or
    both messages: then the completion is learned. `extra`: fields of `OPTIONAL` by name. Raises
    BadRecord."""
    # 1. Text needs no template.
    texts = [value for value in values if isinstance(value, str)]
    if len(texts) == 2:
        prompt, completion = texts
        if not completion:
            raise BadRecord("the completion is empty, so there is nothing to learn")
        notes.add(UNREAD, extra)
        start = 0 if learn == "all" else len(prompt)
        return RenderedConversation(prompt + completion, ((start, len(prompt) + len(completion)),))
    is_completion = len(values) == 2
    if is_completion and texts:
        kinds = " and ".join(map(_kind, values))
        raise BadRecord(
            f"prompt and completion are both text or both lists of messages, not {kinds}"
        )

    # 2. Messages are one conversation, whose last turn is the completion.
    parts: list[list[dict[str, Any]]] = []
    for value in values:
        parts.append(_messages(value, first=1 + sum(map(len, parts))))
    if is_completion and [message["role"] for message in parts[-1]] != ["assistant"]:
        raise BadRecord(
            "a completion of messages is one message of the role assistant; write longer ones as"
            " messages"
        )
    messages = [message for part in parts for message in part]
    _check_learned(messages, learn)
    chat = _chat(messages, extra, day)
    if learn != "all" and not any(message["role"] == "assistant" for message in chat.messages):
        raise BadRecord("no message is of the role assistant, so there is nothing to learn")
    return _render(chat, "last" if is_completion and learn != "all" else learn, notes)


def _chat(messages: list[dict[str, Any]], extra: Mapping[str, Any], day: float) -> Chat:
    """A conversation with what stands beside its messages. Raises BadRecord."""
    # 1. A system prompt of its own is the first message.
    system = extra.get("system")
    if system is not None and not isinstance(system, str):
        raise BadRecord(f"system is {_kind(system)}, where text is needed")
    first = messages[0]
    has_system_message = first["role"] in ("system", "developer")
    if system and has_system_message and first["content"] != system:
        raise BadRecord(
            "there is a field system and a message of the role system, and they differ: leave"
            " one out"
        )
    if system and not has_system_message:
        messages = [{"role": "system", "content": system}, *messages]

    # 2. More variables of the template.
    variables = _parsed(extra.get("chat_template_kwargs", {}))
    if not isinstance(variables, dict):
        raise BadRecord(f"chat_template_kwargs is {_kind(variables)}, where an object is needed")
    if reserved := [name for name in variables if name in _RESERVED_VARIABLES]:
        raise BadRecord(
            f"chat_template_kwargs has {reserved[0]}, which the record or the trainer sets"
        )
    if "documents" in extra:
        variables = {"documents": _parsed(extra["documents"])} | variables

    # 3. Which messages the record says to learn.
    learned = [_is_learned(message) for message in messages]
    plain = [
        {name: value for name, value in message.items() if name not in LEARNED}
        for message in messages
    ]
    return Chat(plain, _parsed(extra.get("tools")), variables, day, learned)


def _is_learned(message: Mapping[str, Any]) -> bool | None:
    """What a message says of itself: whether it is learned, or None."""
    return next((bool(message[name]) for name in LEARNED if name in message), None)


def _check_learned(messages: Sequence[Mapping[str, Any]], learn: Learn) -> None:
    """Raises BadRecord where a message says of itself what cannot be done."""
    for number, message in enumerate(messages, 1):
        flags = {name: message[name] for name in LEARNED if name in message}
        for name, value in flags.items():
            if value not in (0, 1):
                raise BadRecord(
                    f"message {number}: {name} is {value!r}, where 0 or 1, true or false is needed"
                )
        # Trainers have different fields for this, and a message may have those of several.
        if len(set(map(bool, flags.values()))) > 1:
            raise BadRecord(f"message {number}: {' and '.join(flags)} do not say the same")

        # Only turns of the assistant can be chosen by message: others are learned with learn: all,
        # and never without.
        if message["role"] != "assistant" and _is_learned(message) is (learn != "all"):
            wish = "is not to be learned, and learn: all learns all"
            if learn != "all":
                wish = "is to be learned, and only the assistant's are"
            names = " or ".join(LEARNED)
            raise BadRecord(
                f"message {number}, of the role {message['role']}, {wish}: leave {names} out of it"
            )


def _render(chat: Chat, learn: Learn, notes: RecordNotes) -> RenderedConversation:
    """Render a conversation, and note what no token shows of it. Raises BadRecord."""
    if notes.template is None:
        raise BadRecord(
            "messages need a chat template, and none comes with the tokenizer; write data.template:"
            " FILE"
        )
    try:
        check_unmarked([chat.messages, chat.tools, chat.variables])
        rendered = notes.template.render(chat, learn)
        notes.add_unwritten(chat, rendered.text)
    except UnsoundTemplate as fault:
        raise BadRecord(str(fault)) from None
    if not rendered.learned:
        notes.add(UNLEARNED, ["conversations whose turns are all marked as not to learn"])
    return rendered


def _messages(value: object, first: int) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise BadRecord(f"{_kind(value)}, where a list of messages is needed")
    return [_message(entry, number) for number, entry in enumerate(value, first)]


def _message(entry: object, number: int) -> dict[str, Any]:
    which = f"message {number}"
    if not isinstance(entry, dict):
        raise BadRecord(
            f"{which} is {_kind(entry)}, where an object with role and content is needed"
        )
    message = _rename_fields(_without_null_fields(entry), which)

    # 1. Who speaks.
    role = message.get("role")
    if role not in _ROLES:
        known_role = _ROLE_ALIASES.get(role) if isinstance(role, str) else None
        hint = f"; write {known_role}" if known_role else did_you_mean(str(role), _ROLES)
        raise BadRecord(f"{which} has the role {role!r}{hint}")

    # 2. What is said, or called.
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRecord(f"{which}: tool_calls is {_kind(calls)}, where a list of objects is needed")
    if "content" not in message and not calls:
        raise BadRecord(f"{which} has no content")

    # Templates expect a content, also beside calls.
    message["content"] = _join_parts(message.get("content", ""), which)
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _rename_fields(message: dict[str, Any], which: str) -> dict[str, Any]:
    """A message whose ShareGPT fields `from` and `value` are `role` and `content`. Raises BadRecord
    for another speaker."""
    if "from" not in message or "role" in message:
        return message
    speaker = message["from"]
    role = _SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise BadRecord(
            f"{which} is from {speaker!r}{did_you_mean(str(speaker), list(_SHAREGPT_ROLES))}"
        )
    # Fields stay in their order, in which templates may write them.
    new_names = {"from": "role", "value": "content"}
    renamed = {new_names.get(name, name): value for name, value in message.items()}
    renamed["role"] = role
    return renamed


def _join_parts(content: object, which: str) -> str:
    """The text of a content, which may be a list of text parts.
    Raises BadRecord for parts of other types."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [None]:
        entry = part if isinstance(part, dict) else {"text": part}
        kind = entry.get("type", "text")
        if kind != "text":
            raise BadRecord(
                f"{which}: content has a part of the type {kind!r}; only parts of text are for"
                " these models"
            )
        if not isinstance(entry.get("text"), str):
            raise BadRecord(
                f"{which}: content is {_kind(content)}, where text or a list of text parts is"
                " needed"
            )
        texts.append(entry["text"])
    return "".join(texts)


def _without_null_fields(entry: dict[str, Any]) -> dict[str, Any]:
    """Without the fields that are null; what is inside arguments stays as it was written."""
    return {name: value for name, value in entry.items() if value is not None}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object."""
    call = _without_null_fields(dict(call))
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


def _kind(value: object) -> str:
    """What a value is, as a message says it."""
    names = {
        str: "text",
        list: "a list",
        dict: "an object",
        type(None): "null",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return "an empty list" if value == [] else names.get(type(value), type(value).__name__)
