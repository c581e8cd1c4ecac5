"""The documents that a config asks for, as tokens, and what is in them."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longshift.command_results import CorpusFacts
from longshift.config import Config
from longshift.config_parts import PROJECT_VOCAB, Source
from longshift.documents import tokenizer, tokens
from longshift.errors import DataError, LongshiftError
from longshift.workload.lengths import cap_loss, histogram, quantiles

if TYPE_CHECKING:  # `longshift data` needs no ranks
    from longshift.dist.world import World

SAMPLE = 1000  # tokens of a document that is shown
SHARES = (0.5, 0.9, 0.99, 1.0)


def open_tokenizer(config: Config) -> tokenizer.Tokenizer:
    """The tokenizer that `data.tokenizer` names, else the model folder's own, else the project's.
    Raises DataError, also where the model's vocabulary does not hold its ids."""
    path = config.data.tokenizer or config.model.path
    vocab = config.spec.vocab
    if path is not None:
        result = tokenizer.load(path)
    else:
        result = tokenizer.project_tokenizer(config.data.cache, min(PROJECT_VOCAB, vocab))
    result.check_model(vocab)
    return result


def open_corpus(
    config: Config,
    progress: tokens.Progress | None = None,
    verify: bool = True,
    sources: Sequence[Source] | None = None,
) -> tuple[tokenizer.Tokenizer, tokens.TokenCache]:
    """The tokenizer, and the token cache of `sources`, data.train where not given, made now if it
    is not there; `verify` as in `TokenCache.open`. Raises DataError."""
    corpus_tokenizer = open_tokenizer(config)
    data = config.data
    template = Path(data.template) if data.template else None
    cache = tokens.build(
        sources or data.train, corpus_tokenizer, Path(data.cache), progress, verify, template
    )
    return corpus_tokenizer, cache


def open_on_ranks(
    config: Config, world: "World", sources: Sequence[Source] | None = None
) -> tuple[tokenizer.Tokenizer, tokens.TokenCache]:
    """`open_corpus` on every rank; collective. Rank 0 makes the cache where it is not there. Then
    one rank of those that see the same files reads them whole, and the others wait for it. Raises
    LongshiftError, on every rank where one rank has a fault."""
    # 1. Rank 0 opens it first, and may make the cache. Then the others find it there.
    fault = None
    corpus = None
    for ranks in (range(1), range(1, world.size)):
        try:
            if world.rank in ranks:
                corpus = open_corpus(config, verify=False, sources=sources)
        except LongshiftError as error:
            fault = error
        # Ranks that do not see the files of rank 0 make the cache, too: that may take hours.
        world.wait_for(ranks)
        world.agree(fault)
    assert corpus is not None
    _, cache = corpus

    # 2. The same files are verified once.
    if len(set(world.gather_text(cache.fingerprint))) > 1:
        raise DataError(
            f"{cache.folder}: the tokens are not the same on all ranks: every machine needs the"
            " same files"
        )
    identities = world.gather_text(cache.identity)
    readers = {identities.index(identity) for identity in identities}
    try:
        if world.rank in readers:
            cache.verify()
    except LongshiftError as error:
        fault = error
    world.wait_for(readers)
    world.agree(fault)
    return corpus


def corpus_notes(config: Config, cache: tokens.TokenCache) -> list[str]:
    """What the documents hold and training does not learn, a sentence each: fields that no token
    shows, answers that `overlong: truncate` cuts away whole."""
    notes = list(cache.notes)
    limit = config.data.max_len
    if config.data.overlong == "truncate" and cache.learned_tokens is not None:
        # The target of a token is the next one, so the first token is no target.
        longer = (
            cache.learned(int(number), 1, limit + 1)
            for number in np.flatnonzero(cache.lengths > limit)
        )
        cut = sum(learned is not None and not learned.any() for learned in longer)
        if cut:
            notes.append(
                f"overlong: truncate cuts all that is learned off {cut:,} documents (raise"
                " data.max_len, or drop them: overlong: drop)"
            )
    return notes


def survey(config: Config, cache: tokens.TokenCache) -> CorpusFacts:
    """Documents, tokens, lengths, what each cap from a quarter of `data.max_len` to the longest
    document would lose. Where a part is learned: how many tokens, and a document as runs of text
    that are learned, or not."""
    max_len = config.data.max_len
    longest = int(cache.lengths.max())
    caps = sorted(
        {max_len}
        | {2**n for n in range(max(1, (max_len // 4).bit_length() - 1), longest.bit_length())}
    )
    is_all_learned = cache.learned_tokens is None
    return CorpusFacts(
        documents=len(cache),
        tokens=int(cache.lengths.sum()),
        skipped=tuple(cache.skipped),
        notes=tuple(corpus_notes(config, cache)),
        quantiles={
            f"p{100 * share:g}": n for share, n in zip(SHARES, quantiles(cache.lengths, SHARES))
        },
        histogram=histogram(cache.lengths),
        caps=tuple(cap_loss(cache.lengths, cap) for cap in caps if cap >= 2),
        max_len=max_len,
        cache=cache.folder,
        learned=cache.learned_tokens,
        sample=None if is_all_learned else tuple(_sample(config, cache)),
    )


def _sample(config: Config, cache: tokens.TokenCache) -> list[tuple[str, bool]]:
    """The first document of which a part is not learned, cut at SAMPLE tokens."""
    for number in range(len(cache)):
        mask = cache.learned(number)
        if mask is not None and not mask.all():
            break
    else:
        return []
    core = open_tokenizer(config).core
    ids = cache.tokens(number)[:SAMPLE].tolist()
    runs = groupby(zip(ids, mask.tolist()), key=itemgetter(1))
    return [
        (core.decode([token for token, _ in run], skip_special_tokens=False), bool(learned))
        for learned, run in runs
    ]
