"""Tokens that lie beside a `tokenizer.json`, which `transformers` adds when it opens the folder.

tokenizer_config.json   added_tokens_decoder:
                        {"320": {"content": "<|im_start|>", "special": true, ...}}
added_tokens.json       {"<|im_start|>": 320}, in older folders
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from longshift.documents.template import read_json
from longshift.errors import DataError, shown

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def add_tokens_beside(core: tokenizers.Tokenizer, file: Path) -> list[str]:
    """Add the tokens beside a tokenizer's `file` to the tokenizer. Returns each as text: its id and
    its flags.

    Raises DataError where a token would get another id than the folder says,
    or a special token has none."""
    paths = [
        file.parent / name
        for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    ]
    configs = {path.name: read_json(path) if path.exists() else {} for path in paths}
    tokens = _tokens_by_id(configs, file)

    # The repr has the flags, so that a token with other flags is added again.
    present = {repr(token) for token in core.get_added_tokens_decoder().values()}
    descriptions = []
    for token_id, token in sorted(tokens.items()):  # an id is the next number that is free
        if repr(token) in present:
            continue
        core.add_tokens([token])
        new_id = core.token_to_id(token.content)
        if new_id != token_id:
            name = shown(token.content)
            raise DataError(
                f"{file.parent}: {name} has id {token_id} beside {file.name}, and gets {new_id} in"
                " it: the files differ"
            )
        descriptions.append(f"{token_id} {token!r}")

    for name in _special_names(configs):
        if core.token_to_id(name) is None:
            raise DataError(
                f"{file.parent}: the special token {shown(name)} has no id, neither in"
                f" {file.name} nor in a file beside it"
            )
    return descriptions


def _tokens_by_id(
    configs: Mapping[str, dict[str, Any]], file: Path
) -> dict[int, tokenizers.AddedToken]:
    """The tokens beside the file. Raises DataError."""
    decoder = configs["tokenizer_config.json"].get("added_tokens_decoder")
    special = set(_special_names(configs))
    try:
        if decoder:
            return {int(token_id): _token(entry) for token_id, entry in decoder.items()}
        tokens = dict[int, tokenizers.AddedToken]()
        for name, token_id in configs["added_tokens.json"].items():
            is_special = name in special
            tokens[int(token_id)] = tokenizers.AddedToken(
                name, special=is_special, normalized=not is_special
            )
        return tokens
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise DataError(
            f"{file.parent}: the added tokens beside {file.name} cannot be read: {error}"
        ) from None


def _token(entry: Mapping[str, Any]) -> tokenizers.AddedToken:
    flags = {flag: bool(entry[flag]) for flag in _FLAGS if flag in entry}
    return tokenizers.AddedToken(entry["content"], **flags)


def _special_names(configs: Mapping[str, dict[str, Any]]) -> list[str]:
    """Special tokens that have no name of their own, such as <|im_start|>."""
    names = []
    for config in configs.values():
        for key in ("additional_special_tokens", "extra_special_tokens"):
            entries = config.get(key)
            if isinstance(entries, list):
                names += [
                    entry.get("content") if isinstance(entry, dict) else entry for entry in entries
                ]
    return [name for name in names if isinstance(name, str)]
