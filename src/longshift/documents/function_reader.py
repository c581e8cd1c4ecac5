"""Documents that a function of the user's own returns, one by one, each with its number.

"Once upon a time"                                      a text, as the field `text` of a record
{"text": "Once upon a time"}
{"messages": [{"role": "user", "content": "Hi"}, ...]}  a conversation; beside it, what a record may
                                                        have (`chat.OPTIONAL`)
{"ids": [5, 17, 2], "labels": [-100, 17, 2]}            tokens, to which nothing is added; labels as
                                                        in transformers: unshifted
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from longshift.documents.chat import OPTIONAL
from longshift.documents.record_reader import Record
from longshift.errors import DataError, shown
from longshift.user_code import (
    describe_error,
    imported_digest,
    load_object,
    printing_aside,
    split_object,
)

KEY = "data: python"  # of a config, for messages
# What an item holds, and what may be beside it.
_BESIDE = {"text": (), "messages": OPTIONAL, "ids": ("labels",)}
_EXPECTED = "a text, {'text': ...}, {'messages': [...]} or {'ids': [...], 'labels': [...]}"
_NOT_LEARNED = -100  # a label


@dataclass(frozen=True, eq=False)
class TokenIds:
    """One document that is tokens already. `ids`: int64 [tokens]; `learned`: which of them are
    targets, bool [tokens], None for all."""

    ids: np.ndarray
    where: str
    learned: np.ndarray | None


def read_items(text: str, digest: str) -> Iterator[Record | TokenIds]:
    """What the function "module:name" returns. `digest`: SHA-256 of its module's source file, under
    which the documents are kept.

    Raises DataError at the first item that is no document, and for what the function raises;
    UsageError where there is none."""
    function = load_object(text, KEY)
    if imported_digest(text) != digest:
        raise DataError(
            f"{text}: the module has changed since this process imported it; start Python anew"
        )
    where = text
    end = object()
    try:
        items = iter(_call(function, text))
        for number in count(1):
            where = f"{text}, item {number}"
            with printing_aside():
                item = next(items, end)
            if item is end and number > 1:
                return
            if item is end:
                raise DataError(f"{text} returned no document")
            yield _document(item, where)
    except DataError:
        raise
    except (Exception, SystemExit) as fault:
        module_name, _ = split_object(text)
        raise DataError(
            f"{where}: the function raised {describe_error(fault, module_name)}"
        ) from fault


def _call(function: object, text: str) -> Iterable[object]:
    """What a function returns, if that can be a list of documents. Raises DataError, and what the
    function raises."""
    if not callable(function):
        raise DataError(
            f"{text} is {shown(function)}, where a function without arguments is needed"
        )
    with printing_aside():
        items = function()
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
        raise DataError(
            f"{text} returned {shown(items)}, where an iterable of documents is needed, each"
            f" {_EXPECTED}"
        )
    return items


def _document(item: object, where: str) -> Record | TokenIds:
    """The document of an item. Raises DataError for one that is none."""
    # 1. Which kind of document it is: one field says so.
    record = {"text": item} if isinstance(item, str) else item
    kinds = [kind for kind in _BESIDE if kind in record] if isinstance(record, Mapping) else []
    if not isinstance(record, Mapping) or len(kinds) != 1:
        raise DataError(f"{where}: {shown(item)} is no document, where {_EXPECTED} is expected")
    kind = kinds[0]

    # 2. Its fields. Others are counted as not read, but beside ids nothing else may be.
    names = [name for name in (kind, *_BESIDE[kind]) if name in record]
    if kind == "ids":
        if len(record) > len(names):
            raise DataError(
                f"{where}: beside ids there is {', '.join(map(str, record.keys() - names))}, where"
                " labels may be"
            )
        return _token_ids(record["ids"], record.get("labels"), where)
    fields = {name: record[name] for name in names}
    if kind == "messages":
        fields = _as_json(fields, where)
    return Record(fields, where, tuple(str(name) for name in record if name not in names))


def _as_json(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """As a file would hold them, since the template's process gets them as JSON.
    Raises DataError."""
    try:
        return json.loads(json.dumps(fields))
    except (TypeError, ValueError, RecursionError) as fault:
        raise DataError(f"{where}: messages hold what JSON cannot: {fault}") from None


def _token_ids(ids: object, labels: object, where: str) -> TokenIds:
    tokens = _integers(ids, "ids", where)
    if len(tokens) < 2:
        raise DataError(
            f"{where}: ids has {len(tokens)} tokens, and a document has at least two: one to read,"
            " one to predict"
        )
    if labels is None:
        return TokenIds(tokens, where, None)
    targets = _integers(labels, "labels", where)
    if len(targets) != len(tokens):
        raise DataError(
            f"{where}: ids has {len(tokens)} tokens and labels has {len(targets)}, where each token"
            " has a label"
        )

    # A label that is another id would mean that labels were shifted already, or another loss.
    learned = targets != _NOT_LEARNED
    wrong = np.flatnonzero(learned & (targets != tokens))
    if len(wrong):
        index = wrong[0]
        raise DataError(
            f"{where}: labels[{index}] is {targets[index]} and ids[{index}] is {tokens[index]}: a"
            f" label is the id at its own place, or {_NOT_LEARNED} where that is not learned"
        )
    return TokenIds(tokens, where, learned)


def _integers(values: object, name: str, where: str) -> np.ndarray:
    """A row of integers as int64. Raises DataError for anything else."""
    try:
        row = np.asarray(values)
    except Exception:  # a ragged list, a tensor on a GPU
        row = np.zeros((0, 0))
    if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
        raise DataError(f"{where}: {name} is {shown(values)}, where a row of integers is needed")
    return row.astype(np.int64)
