"""Tokens that lie beside a `tokenizer.json`, which `transformers` adds when it opens the folder.

tokenizer_config.json   added_tokens_decoder: {"320": {"content": "<|im_start|>", "special": true, ...}}
added_tokens.json       {"<|im_start|>": 320}, in older folders
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from longshift.documents.template import read_json
from longshift.errors import DataError, shown

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def add_tokens_beside(core: tokenizers.Tokenizer, at: Path) -> list[str]:
    """Add the tokens beside the tokenizer file `at` to the tokenizer that it holds. What was added, as text.

    Raises DataError where a token would get another id than the folder says, or a special token has none.
    """
    paths = [at.parent / name for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")]
    configs = {path.name: read_json(path) if path.exists() else {} for path in paths}
    tokens = _tokens_of(configs, at)
    known = {repr(token) for token in core.get_added_tokens_decoder().values()}
    added = []
    for number, token in sorted(tokens.items()):
        if repr(token) in known:
            continue
        core.add_tokens([token])
        if core.token_to_id(token.content) != number:
            id_ = core.token_to_id(token.content)
            raise DataError(f"{at.parent}: {shown(token.content)} has id {number} beside {at.name}, and gets {id_} in it: the files differ")
        added.append(f"{number} {token!r}")
    for name in _special_names(configs):
        if core.token_to_id(name) is None:
            raise DataError(f"{at.parent}: the special token {shown(name)} has no id, neither in {at.name} nor in a file beside it")
    return added


def _tokens_of(configs: Mapping[str, dict[str, Any]], at: Path) -> dict[int, tokenizers.AddedToken]:
    """By id."""
    decoder = configs["tokenizer_config.json"].get("added_tokens_decoder")
    special = set(_special_names(configs))
    try:
        if decoder:
            return {int(number): _token(entry) for number, entry in decoder.items()}
        listed = configs["added_tokens.json"].items()
        return {
            int(number): tokenizers.AddedToken(name, special=name in special, normalized=name not in special) for name, number in listed
        }
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise DataError(f"{at.parent}: the added tokens beside {at.name} cannot be read: {error}") from None


def _token(entry: Mapping[str, Any]) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(entry["content"], **{flag: bool(entry[flag]) for flag in _FLAGS if flag in entry})


def _special_names(configs: Mapping[str, dict[str, Any]]) -> list[str]:
    """Special tokens that have no name of their own, such as <|im_start|>."""
    names = []
    for config in configs.values():
        for key in ("additional_special_tokens", "extra_special_tokens"):
            entries = config.get(key)
            entries = entries if isinstance(entries, list) else []
            names += [entry.get("content") if isinstance(entry, dict) else entry for entry in entries]
    return [name for name in names if isinstance(name, str)]
