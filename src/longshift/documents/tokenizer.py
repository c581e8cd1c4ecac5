"""Texts to token ids, and which of them are learned: a `tokenizer.json` as it is, or the project's
own small byte-level BPE."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from longshift.config_parts import Source
from longshift.documents.function_reader import TokenIds
from longshift.documents.sources import Text, files, read
from longshift.documents.template import read_configs, token_content
from longshift.documents.trial import why_not
from longshift.errors import DataError, shown
from longshift.files import publish
from longshift.yaml_reader import not_text

END_OF_TEXT = "<|endoftext|>"
# Of a token that is described beside a `tokenizer.json`.
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
Configs = Mapping[str, dict[str, Any]]  # `template.read_configs`


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer that closes every document.

    `eos` the end-of-text id; `vocab` the largest id plus one; `file` its `tokenizer.json`;
    `fingerprint`
    SHA-256 of `tokenizer.json`, the end-of-text id and tokens beside the file: tokenizers of equal
    fingerprint make equal tokens."""

    core: tokenizers.Tokenizer
    eos: int
    vocab: int
    file: Path
    fingerprint: str

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, closed by end of text where the text does not end with it.

        The tokenizer itself adds its special tokens, such as begin of text. A special token that is
        spelled out in a text becomes that token, as in `transformers`.
        """
        encodings = self.core.encode_batch_fast(list(texts))
        return [self._close(text, encoding.ids) for text, encoding in zip(texts, encodings)]

    def encode_documents(
        self, documents: Sequence[Text | TokenIds]
    ) -> Iterator[tuple[Sequence[int], np.ndarray | None]]:
        """Token ids of each document, in order, and which of them are targets, bool [tokens]; None
        for all.

        Targets of a text have a character that is learned; end of text is one where the token
        before it is. Raises DataError for an id that is no token."""
        texts = [item.text for item in documents if isinstance(item, Text) and item.learned is None]

        # Plain texts are encoded together, which the library does on several cores.
        encoded = iter(self.encode(texts))
        for document in documents:
            if isinstance(document, TokenIds):
                self._check_ids(document)
                yield document.ids.tolist(), document.learned
            elif document.learned is None:
                yield next(encoded), None
            else:
                yield self._encode_learned(document)

    def _encode_learned(self, text: Text) -> tuple[list[int], np.ndarray]:
        # A template has written all special tokens that there are. Where one of them ends the
        # text, nothing closes it.
        encoding = self.core.encode(text.text, add_special_tokens=not text.rendered)
        is_closed = text.rendered and text.text.rstrip().endswith(self.special)
        ids = encoding.ids if is_closed else self._close(text.text, encoding.ids)
        return ids, _learned(text, encoding.offsets, len(ids))

    def _check_ids(self, document: TokenIds) -> None:
        wrong = document.ids[(document.ids < 0) | (document.ids >= self.vocab)]
        if len(wrong):
            raise DataError(
                f"{document.where}: ids has {wrong[0]}, and tokens of {self.file} are 0 to"
                f" {self.vocab - 1}"
            )

    def _close(self, text: str, ids: list[int]) -> list[int]:
        is_closed = ids[-1:] == [self.eos] or text.rstrip().endswith(self.end)
        return ids if is_closed else [*ids, self.eos]

    @cached_property
    def end(self) -> str:
        """The end-of-text token, as it is written."""
        return self.core.id_to_token(self.eos) or END_OF_TEXT

    @cached_property
    def special(self) -> tuple[str, ...]:
        """All special tokens, as they are written."""
        added = self.core.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special and token.content)

    def check_model(self, vocab: int) -> None:
        """Raises DataError when a model with this vocabulary cannot embed every id."""
        if self.vocab > vocab:
            raise DataError(
                f"{self.file}: the tokenizer's largest id is {self.vocab - 1}, but the model's"
                f" vocabulary has {vocab} tokens (ids 0 to {vocab - 1}); use the model's own"
                f" tokenizer, or set the model's vocab to {self.vocab}"
            )


def load(path: Path | str) -> Tokenizer:
    """Read `tokenizer.json`, from its path or its folder's, and the end-of-text token that lies
    beside it.

    Another process tries it first. Raises DataError.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / "tokenizer.json"
    reason = why_not(file) if file.is_file() else None
    if reason:
        raise DataError(f"{file}: cannot be read as a tokenizer: {reason}")
    return _open(file)


def _open(file: Path) -> Tokenizer:
    """Read a tokenizer that is known to return. Raises DataError."""
    try:
        data = file.read_bytes()
        core = tokenizers.Tokenizer.from_str(data.decode())
    except FileNotFoundError:
        raise DataError(
            f"{file}: there is no tokenizer; a model folder carries one as tokenizer.json"
        ) from None
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        raise DataError(f"{file}: cannot be read as a tokenizer: {error}") from error

    # A document is encoded as a whole, and alone.
    core.no_truncation()
    core.no_padding()
    if getattr(core.model, "dropout", None):
        raise DataError(
            f"{file}: model.dropout is {core.model.dropout}: tokens are made once and must not be"
            " drawn; set it to null"
        )
    configs = read_configs(file)
    added_tokens = _add_tokens_beside(core, file, configs)
    eos = _end_of_text(core, file, configs)
    context = "\n".join(["", str(eos), *added_tokens])
    return Tokenizer(
        core=core,
        eos=eos,
        vocab=max(core.get_vocab().values()) + 1,
        file=file,
        fingerprint=hashlib.sha256(data + context.encode()).hexdigest(),
    )


def _add_tokens_beside(core: tokenizers.Tokenizer, file: Path, configs: Configs) -> list[str]:
    """Add the tokens that lie beside a tokenizer's `file`, as `transformers` does when it opens the
    folder. Returns each as text: its id and its flags.

        tokenizer_config.json   added_tokens_decoder:
                                {"320": {"content": "<|im_start|>", "special": true, ...}}
        added_tokens.json       {"<|im_start|>": 320}, in older folders

    Raises DataError where a token would get another id than the folder says,
    or a special token has none."""
    special = _special_names(configs)
    tokens = _tokens_by_id(configs, special, file)

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

    for name in special:
        if core.token_to_id(name) is None:
            raise DataError(
                f"{file.parent}: the special token {shown(name)} has no id, neither in"
                f" {file.name} nor in a file beside it"
            )
    return descriptions


def _tokens_by_id(
    configs: Configs, special: Sequence[str], file: Path
) -> dict[int, tokenizers.AddedToken]:
    """The tokens beside the file. Raises DataError."""
    decoder = configs.get("tokenizer_config.json", {}).get("added_tokens_decoder")
    tokens = dict[int, tokenizers.AddedToken]()
    try:
        if decoder:
            for token_id, entry in decoder.items():
                flags = {flag: bool(entry[flag]) for flag in _FLAGS if flag in entry}
                tokens[int(token_id)] = tokenizers.AddedToken(entry["content"], **flags)
            return tokens
        for name, token_id in configs.get("added_tokens.json", {}).items():
            is_special = name in special
            tokens[int(token_id)] = tokenizers.AddedToken(
                name, special=is_special, normalized=not is_special
            )
        return tokens
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise DataError(
            f"{file.parent}: the added tokens beside {file.name} cannot be read: {error}"
        ) from None


def _special_names(configs: Configs) -> list[str]:
    """Special tokens that have no name of their own, such as <|im_start|>."""
    names = []
    for config in configs.values():
        for key in ("additional_special_tokens", "extra_special_tokens"):
            entries = config.get(key)
            if isinstance(entries, list):
                names += map(token_content, entries)
    return [name for name in names if isinstance(name, str)]


def project_tokenizer(cache: Path | str, vocab: int = 4096) -> Tokenizer:
    """The project's tokenizer: byte-level BPE of `vocab` tokens, trained on the installed standard
    library.

    It is kept in folder `cache` under a name that stands for the files, the size and the trainer.
    Raises DataError when the folder cannot be written.
    """
    # Every fourth file: about 8 MB, a second or two. All files would save 1 % of the tokens.
    library = files(Source(corpus="python"))[::4]
    file_facts = [(file.path, file.size_bytes, file.mtime_ns) for file in library]
    inputs = (vocab, tokenizers.__version__, file_facts)
    key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
    target = Path(cache).expanduser() / f"tokenizer-{key[:16]}"
    if not target.exists():
        texts = (item.text for file in library for item in read(file) if isinstance(item, Text))
        try:
            publish(target, lambda folder: _write(train(texts, vocab), folder))
        except DataError:
            raise
        except Exception as error:  # the library raises bare Exception where it cannot write
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"{target}: cannot write the tokenizer: {reason}") from error
    return _open(target / "tokenizer.json")


def train(texts: Iterator[str], vocab: int) -> tokenizers.Tokenizer:
    """Byte-level BPE of `vocab` tokens, the end-of-text token first. Equal texts give an equal
    tokenizer. Raises DataError when `vocab` is less than the 256 bytes and the end-of-text token,
    or the texts are too few to fill it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab <= len(alphabet):
        raise DataError(
            f"a byte-level tokenizer needs at least {len(alphabet) + 1} tokens, not {vocab}: 256"
            " bytes and end of text"
        )
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    core.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    if core.get_vocab_size() != vocab:
        raise DataError(
            f"the texts give only {core.get_vocab_size()} of {vocab} tokens; ask for fewer or train"
            " on more text"
        )
    return core


def _learned(text: Text, offsets: Sequence[tuple[int, int]], tokens: int) -> np.ndarray:
    """Which of a text's tokens are targets, bool [tokens]. `offsets`: the characters of each
    token."""
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    spans = text.learned or ()
    learned = np.zeros(tokens, bool)
    for first, last in spans:
        learned[: len(starts)] |= (starts < last) & (ends > first)

    # The last tokens close the text and have no characters: they are targets where the text's end
    # is learned.
    closing_start = 1 + int(np.flatnonzero(ends > starts).max(initial=-1))
    learned[closing_start:] = bool(spans) and spans[-1][1] >= len(text.text.rstrip())
    return learned


def _write(core: tokenizers.Tokenizer, folder: Path) -> None:
    core.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _end_of_text(core: tokenizers.Tokenizer, file: Path, configs: Configs) -> int:
    """The id of `eos_token` as the files beside the tokenizer name it, else of `<|endoftext|>`.
    Raises DataError for neither."""
    for name, config in configs.items():
        token = token_content(config.get("eos_token"))
        if token is None:
            continue
        place = f"{file.parent / name}: eos_token {shown(token)}"
        if not isinstance(token, str) or not_text(token):
            raise DataError(f"{place} is not a text")
        eos = core.token_to_id(token)
        if eos is None:
            raise DataError(f"{place} is not a token of {file}")
        return eos
    eos = core.token_to_id(END_OF_TEXT)
    if eos is None:
        config = file.parent / "tokenizer_config.json"
        raise DataError(
            f'{file}: which token ends a text is not known; write it into {config}: {{"eos_token":'
            ' "..."}'
        )
    return eos
