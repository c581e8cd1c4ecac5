"""Named wrong variants of the trainer, each a mistake that a real system has made or could make. A comparison that lets one through is
worth nothing.

A mutant is a function that patches the package inside a forked rank; CASES says which layouts it must show under, and by how much.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace

import caches
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from parity import CLIP
from torch import Tensor
from trial import compare

from longshift.dist.collectives import Group, Pending
from longshift.dist.world import World
from longshift.documents import batch as batch_module
from longshift.documents import micro as micro_module
from longshift.documents.batch import Document
from longshift.documents.micro import HostPack
from longshift.layout.layout import Layout
from longshift.layout.placement import Bucket
from longshift.model import attention as attention_module
from longshift.model import decoder, float8
from longshift.model.attention import Attention
from longshift.model.decoder import Block, Head, MicroBatch, Unit
from longshift.model.functions import AdaptedLinear, add_product
from longshift.model.loss import IGNORE
from longshift.parallel import ring, ulysses
from longshift.parallel.seams import LayoutOps
from longshift.program.operations import Op, Program
from longshift.schedule import chunks, sequence, windows
from longshift.schedule.event import Event
from longshift.schedule.sequence import TokenOrder
from longshift.schedule.windows import Mask
from longshift.spec import model
from longshift.spec.adapters import Lora
from longshift.spec.model import ModelSpec
from longshift.spec.param import Part
from longshift.state import copies as copies_module
from longshift.state.copies import AlignedCopies
from longshift.state.home import Shard
from longshift.state.optimizer import Optimizer
from longshift.state.strip_views import Strips, StripViews
from longshift.state.transfer import SwitchTransfer
from longshift.state.visit import Switches
from longshift.step import chunk_runner as chunked_module
from longshift.step import runner as runner_module
from longshift.step.chunk_runner import ChunkedPacks, ChunkPlayer
from longshift.step.player import Player, Ready
from longshift.step.runner import Runner, WholePacks
from longshift.stream.tiers import DiskTier, Tensors
from longshift.switch.plan import Move, Plan
from longshift.workload import groups

Patch = pytest.MonkeyPatch
reverse = Plan.reversed
MIDWAY = 3  # updates done when a mutant damages the optimizer


@contextmanager
def mistaken(mutant: str) -> Iterator[None]:
    """This process has the mistake."""
    with pytest.MonkeyPatch.context() as patch:
        caches.clear()
        globals()[mutant](patch)
        try:
            yield
        finally:
            caches.clear()


def compare_mutant(world: World, mutant: str, **arguments) -> dict[str, float]:
    """`train.check.compare` on a rank that has this mistake."""
    with mistaken(mutant):
        return compare(world, **arguments)  # pyright: ignore[reportArgumentType]


def _programs(patch: Patch, change: Callable[[Player, int, Program], Program], scores: bool = False) -> None:
    """`change` sees this rank's player, how many steps it has trained before, and the program of a step; where `scores`, also those of
    validations."""
    take, made = Player.take, Counter[int]()

    def wrong(self: Player, ready: Ready, seed: float | None) -> Program:
        found = take(self, ready, seed)
        if seed is not None or scores:
            found = change(self, made[id(self)], found)
        made[id(self)] += seed is not None
        return found

    patch.setattr(Player, "take", wrong)


def _seeds(patch: Patch, seed: Callable[[Player, int, Layout], float]) -> None:
    """`seed` sees this rank's player, a visit and its layout: what losses are multiplied with before gradients are formed."""

    def change(player: Player, number: int, program: Program) -> Program:
        for visit, group in enumerate(player.groups_here):
            player.runners[group.layout].seed = seed(player, visit, group.layout)
        return program

    _programs(patch, change)


# ---- the loss and its divisor


def mean_of_means(patch: Patch) -> None:
    """Every replica divides by its own target tokens, and the replicas are averaged."""

    def seed(player: Player, visit: int, layout: Layout) -> float:
        shares = (share for (of, _), pack in player.packs.items() if of == visit for share in pack.shares)
        own = sum(int((share.labels != IGNORE).sum()) for share in shares)
        return 1 / (max(1, own) * layout.dp)

    _seeds(patch, seed)


def leftover_documents_dropped(patch: Patch) -> None:
    """Documents that do not divide by the number of replicas are left out."""
    shares = groups.shares

    def wrong(costs: list[float], replicas: int) -> tuple[tuple[int, ...], ...]:
        deal = shares(costs, replicas)
        return tuple(share[: min(map(len, deal))] for share in deal)

    patch.setattr(groups, "shares", wrong)


def gradient_times_sequence_degree(patch: Patch) -> None:
    """The gradient is summed over the ranks of a sequence as if each had seen all of it."""
    _seeds(patch, lambda player, visit, layout: player.runners[layout].seed * layout.sequence)


def loss_counted_by_every_tensor_rank(patch: Patch) -> None:
    """All tensor-parallel ranks, which know the same loss, add it to the total."""
    patch.setattr(Runner, "counts", lambda self, loss: self.loss.add_(loss))


def score_counted_by_every_tensor_rank(patch: Patch) -> None:
    """All tensor-parallel ranks add the loss of a validation to the total."""
    right = runner_module.score_of_rows

    def wrong(head: Head, x: Tensor, micro: MicroBatch, ops: LayoutOps, number: int) -> Tensor:
        return right(head, x, micro, ops, number) * ops.groups["tp"].size

    patch.setattr(runner_module, "score_of_rows", wrong)


def score_without_the_last_rows(patch: Patch) -> None:
    """A validation leaves out the last token of a chunk."""
    right = chunked_module.score_of_rows

    def wrong(head: Head, x: Tensor, micro: MicroBatch, ops: LayoutOps, number: int) -> Tensor:
        labels = micro.labels_T.clone()
        labels[-1] = IGNORE
        return right(head, x, replace(micro, labels_T=labels), ops, number)

    patch.setattr(chunked_module, "score_of_rows", wrong)


def micro_batches_overwrite(patch: Patch) -> None:
    """A micro-batch's gradient replaces that of the one before."""
    accumulate = AlignedCopies.accumulate

    def wrong(self: AlignedCopies, unit: int) -> None:
        self.fused[unit].sums = None
        accumulate(self, unit)

    patch.setattr(AlignedCopies, "accumulate", wrong)


def products_overwrite(patch: Patch) -> None:
    """A weight's gradient is what the last matmul gave."""
    patch.setattr(copies_module, "add_product", lambda total, left, right, first: add_product(total, left, right, True))


def tokens_share_a_scale(patch: Patch) -> None:
    """Eight-bit factors have one scale for all tokens that a rank has in a pack or chunk."""
    rounded = float8.rounded
    patch.setattr(float8, "rounded", lambda x, rows=1: rounded(x, len(x) if rows == 1 else rows))


def slices_have_a_scale(patch: Patch) -> None:
    """Eight-bit factors have one scale for all columns of a rank's slice."""
    patch.setattr(float8, "runs", lambda size, every: [(slice(0, size), size if every > 1 else 1)])


def last_micro_batch_added_up_a_step_later(patch: Patch) -> None:
    """One block's gradients of the last backward stay on its weights, to be added to the next step's."""

    def change(player: Player, number: int, program: Program) -> Program:
        places = [at for at, op in enumerate(program) if op.kind == "accumulate" and op.unit == 1]
        return program[: places[-1]] + program[places[-1] + 1 :] if len(places) > 1 else program

    _programs(patch, change)


def reduced_before_the_last_micro_batch(patch: Patch) -> None:
    """One block's sum goes home before the last backward's gradients are added to it."""

    def change(player: Player, number: int, program: Program) -> Program:
        places = [at for at, op in enumerate(program) if op.kind in ("accumulate", "reduce") and op.unit == 1]
        if not places:
            return program
        *_, added, reduced = places
        ops = list(program)
        ops[added], ops[reduced] = ops[reduced], ops[added]
        return tuple(ops)

    _programs(patch, change)


# ---- what a rank sees of a pack


def _micro_batches(patch: Patch, change: Callable[[MicroBatch], MicroBatch]) -> None:
    """Of whole packs and of chunks."""
    right = micro_module.place_pack
    for module in (runner_module, micro_module):
        patch.setattr(module, "place_pack", lambda *arguments, **angles: change(right(*arguments, **angles)))


def no_document_mask(patch: Patch) -> None:
    """The documents of a pack attend to each other."""
    right = decoder.PackedAttention
    one_run = lambda q, k, v, lengths, *rest: right.apply(q, k, v, (sum(lengths),), *rest)  # noqa: E731
    patch.setattr(decoder, "PackedAttention", SimpleNamespace(apply=one_run))


def positions_not_reset(patch: Patch) -> None:
    """Positions go on from document to document. Rotary embedding sees differences of positions only: there it is none."""
    patch.setattr(TokenOrder, "positions", lambda self, ring: np.maximum(self.index(ring), 0))


def label_lost_at_shard_edge(patch: Patch) -> None:
    """The last token of a shard has no label."""

    def change(micro: MicroBatch) -> MicroBatch:
        return replace(micro, labels_T=torch.cat((micro.labels_T[:-1], micro.labels_T.new_full((1,), IGNORE))))

    _micro_batches(patch, change)


def labels_shifted_inside_shards(patch: Patch) -> None:
    """A token's label is the token after it in the shard, not in the document."""

    def change(micro: MicroBatch) -> MicroBatch:
        following = micro.tokens_T.roll(-1)
        return replace(micro, labels_T=torch.where(micro.labels_T == IGNORE, IGNORE, following))

    _micro_batches(patch, change)


def labels_shifted_twice(patch: Patch) -> None:
    """The data shifts the labels and the loss shifts them again."""
    right = runner_module.host_pack

    def shifted(documents: list[Document], *rest: object) -> HostPack:
        return right([Document(d.ids, np.append(d.labels[1:], IGNORE)) for d in documents], *rest)  # pyright: ignore

    patch.setattr(runner_module, "host_pack", shifted)


def padding_read_as_data(patch: Patch) -> None:
    """Padding has a label: token 0."""
    patch.setattr("longshift.documents.micro.IGNORE", 0)


# ---- gradients on their way home


def _own_gradients(patch: Patch, chosen: Callable[[ModelSpec, str, Bucket], bool]) -> None:
    """For the chosen weights home gets this rank's own gradient, not the sum over the holders (ZeRO-0)."""
    reduce, receive = AlignedCopies.reduce, Shard.receive
    own: dict[int, tuple[ModelSpec, Tensor]] = {}

    def wrong_reduce(self: AlignedCopies, unit: int) -> None:
        fused = self.fused[unit]
        own.update({id(bucket.shard): (self.spec, total.clone().view(-1)) for bucket, total in zip(fused.learning, fused.sums or ())})
        reduce(self, unit)

    def wrong_receive(self: Shard, total: Tensor) -> None:
        spec, mine = own[id(self)]
        for (name, _, view), (_, _, alone) in zip(self.views(total), self.views(mine)):
            if chosen(spec, name, self.bucket):
                view.copy_(alone)
        receive(self, total)

    patch.setattr(AlignedCopies, "reduce", wrong_reduce)
    patch.setattr(Shard, "receive", wrong_receive)


def norm_gradients_not_reduced(patch: Patch) -> None:
    """A norm's gradient is not summed over the ranks that each saw some of the tokens."""
    _own_gradients(patch, lambda spec, name, bucket: spec.by_name[name].role.startswith("norm"))


def adapter_gradients_not_reduced(patch: Patch) -> None:
    """Tensor-parallel ranks keep their own part of the gradient of what each has whole of an adapter."""
    whole = ("q_lora_a", "v_lora_a", "o_lora_b", "down_lora_b")
    _own_gradients(patch, lambda spec, name, bucket: spec.by_name[name].role in whole)


def _adapters(patch: Patch, change: Callable[[tuple, float], tuple]) -> None:
    """Change what the backward of an adapted layer gives; `change` sees the gradients and the scale."""
    native = AdaptedLinear.backward
    patch.setattr(AdaptedLinear, "backward", staticmethod(lambda ctx, grad: change(native(ctx, grad), ctx.scale)))


def adapter_gradients_not_scaled(patch: Patch) -> None:
    """Gradients of adapters lack alpha / rank."""
    _adapters(patch, lambda grads, scale: (*grads[:3], grads[3] / scale, grads[4] / scale, *grads[5:]))


def adapter_without_gradient_of_its_input(patch: Patch) -> None:
    """What goes back through an adapted layer goes through its weight alone."""
    native = AdaptedLinear.backward

    def backward(ctx, grad: Tensor) -> tuple:
        return torch.mm(grad, ctx.saved_tensors[1]), *native(ctx, grad)[1:]

    patch.setattr(AdaptedLinear, "backward", staticmethod(backward))


def shared_head_gradients_not_reduced(patch: Patch) -> None:
    """Tensor-parallel ranks that hold the same key/value head keep their own gradient of it."""
    _own_gradients(patch, lambda spec, name, bucket: spec.by_name[name].role in "kv" and len(bucket.holders) > 1)


def tied_gradient_not_summed_over_stages(patch: Patch) -> None:
    """The first stage keeps the gradient of the look-up and the last stage that of the head."""
    _own_gradients(patch, lambda spec, name, bucket: bucket.unit == spec.units)


def tied_head_gradient_dropped(patch: Patch) -> None:
    """Only the look-up's gradient reaches a tied embedding."""

    def logits(self: Head, x: Tensor, ops: LayoutOps) -> Tensor:
        return F.linear(ops.enter(self.norm_of(x, "norm")), self.embed.detach())

    patch.setattr(Head, "logits", logits)


def average_for_sum(patch: Patch) -> None:
    """Collectives average gradients that are already divided by the global token count."""

    def averaged(pending: Pending, out: Tensor, size: int) -> Pending:
        finish = pending.finish or (lambda: None)
        return replace(pending, finish=lambda: (finish(), out.div_(size)))

    all_reduce, reduce_scatter = Group.start_all_reduce, Group.reduce_scatter
    patch.setattr(Group, "start_all_reduce", lambda self, x: averaged(all_reduce(self, x), x, self.size))
    patch.setattr(Group, "reduce_scatter", lambda self, out, x: averaged(reduce_scatter(self, out, x), out, self.size))


def one_gradient_sent_twice(patch: Patch) -> None:
    """Rank 0's gradients are in the sum two times."""
    reduce = AlignedCopies.reduce

    def wrong(self: AlignedCopies, unit: int) -> None:
        for total in self.fused[unit].sums or ():
            total.mul_(1 + (self.world.rank == 0))
        reduce(self, unit)

    patch.setattr(AlignedCopies, "reduce", wrong)


def clip_by_local_norm(patch: Patch) -> None:
    """Every rank clips by the norm of what it keeps."""
    update = Optimizer.update

    def wrong(self: Optimizer, lr: float, factor: float) -> None:
        local = max(float(s.grad.norm()) for s in self.home.shards if s.grad is not None)
        update(self, lr, min(1.0, CLIP / local))

    patch.setattr(Optimizer, "update", wrong)


# ---- home and the optimizer


def _moments(optimizer: Optimizer, *names: str) -> list[Tensor]:
    return [shard.moment(name) for shard in optimizer.home.learning for name in names]


def _midway(patch: Patch, damage: Callable[[Optimizer], object]) -> None:
    update = Optimizer.update

    def wrong(self: Optimizer, lr: float, factor: float) -> None:
        if self.steps == MIDWAY:
            damage(self)
        update(self, lr, factor)

    patch.setattr(Optimizer, "update", wrong)


def adam_step_reset(patch: Patch) -> None:
    """The step of the bias correction starts again."""
    apply = Optimizer._apply

    def wrong(self: Optimizer, shards: Sequence[Shard], lr: float, factor: float, step: int) -> None:
        apply(self, shards, lr, factor, step - MIDWAY if step > MIDWAY else step)

    patch.setattr(Optimizer, "_apply", wrong)


def first_moment_reset(patch: Patch) -> None:
    """exp_avg is forgotten."""
    _midway(patch, lambda optimizer: [moment.zero_() for moment in _moments(optimizer, "exp_avg")])


def second_moment_reset(patch: Patch) -> None:
    """exp_avg_sq is forgotten."""
    _midway(patch, lambda optimizer: [moment.zero_() for moment in _moments(optimizer, "exp_avg_sq")])


def momentum_reset(patch: Patch) -> None:
    """momentum_buffer is forgotten."""
    _midway(patch, lambda optimizer: [moment.zero_() for moment in _moments(optimizer, "momentum_buffer")])


def _through_bf16(x: Tensor) -> Tensor:
    return x.copy_(x.bfloat16())


def master_through_bf16(patch: Patch) -> None:
    """Master weights pass through bfloat16 once."""
    _midway(patch, lambda optimizer: [_through_bf16(shard.master) for shard in optimizer.home.shards])


def moments_through_bf16(patch: Patch) -> None:
    """Moments pass through bfloat16 once."""
    _midway(patch, lambda optimizer: [_through_bf16(moment) for moment in _moments(optimizer, *optimizer.home.moments)])


def gradients_through_bf16(patch: Patch) -> None:
    """Gradients arrive at home in bfloat16."""
    receive = Shard.receive
    patch.setattr(Shard, "receive", lambda self, total: receive(self, _through_bf16(total)))


# ---- weights on their way out


def never_gathered_again(patch: Patch) -> None:
    """Copies stay those of the first step (stages 1 to 3 of ZeRO)."""
    gather, before = AlignedCopies.gather, set[tuple[int, int]]()

    def wrong(self: AlignedCopies, unit: int) -> None:
        if (id(self), unit) not in before:
            before.add((id(self), unit))
            gather(self, unit)

    patch.setattr(AlignedCopies, "gather", wrong)
    patch.setattr(AlignedCopies, "release", lambda self, unit: None)


def one_stale_prefetch(patch: Patch) -> None:
    """One block's weights were prefetched before the update, in one step."""
    gathers = ("gather", "await gather")
    _programs(patch, lambda _, number, program: tuple(op for op in program if number != 1 or op.kind not in gathers or op.unit != 1), True)


def slices_in_wrong_order(patch: Patch) -> None:
    """The ZeRO slices of weights that all four ranks hold are labelled with dp fastest, while ranks count with tp fastest."""
    init = Strips.__init__

    def swapped(views: StripViews) -> Iterator[StripViews]:
        for number, slot in enumerate(range(views.strip.first, views.strip.last)):
            first, rows = views.at[0].start + number * views.shape[1], views.shape[1]
            place, at = (0, 2, 1, 3)[slot], (slice(first, first + rows), *views.at[1:])
            yield replace(views, strip=replace(views.strip, first=place, last=place + 1), shape=(1, *views.shape[1:]), at=at)

    def wrong(self: Strips, bucket: Bucket, *rest: object) -> None:
        init(self, bucket, *rest)  # pyright: ignore[reportArgumentType]
        if self.slots == 4:
            self.strips = tuple(one for views in self.strips for one in swapped(views))

    patch.setattr(Strips, "__init__", wrong)


# ---- tensor parallelism


def fused_qkv_cut_as_one(patch: Patch) -> None:
    """Query, key and value columns of a fused matrix are sliced together: the function depends on tp."""
    table = model._parameter_table

    def wrong(spec: ModelSpec) -> Iterator[model.Param]:
        for param in table(spec):
            whole = (Part(spec.heads + 2 * spec.kv_heads, spec.head_width),)
            yield replace(param, parts=whole) if param.role.startswith("fused") else param

    patch.setattr(model, "_parameter_table", wrong)


def row_bias_on_every_rank(patch: Patch) -> None:
    """The bias of a row-parallel linear is added before the sum over the ranks."""

    def wrong(self: Block, x: Tensor, role: str, ops: LayoutOps) -> Tensor:
        return ops.leave(self.linear(x, role))

    patch.setattr(Block, "row_linear", wrong)


# ---- sequence parallelism


def ulysses_keys_for_values(patch: Patch) -> None:
    """Keys and values change places in the all-to-all."""
    to_heads = ulysses.to_heads

    def wrong(*arguments) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = to_heads(*arguments)
        return q, v, k

    patch.setattr(ulysses, "to_heads", wrong)


def ulysses_one_gradient_of_shared_heads(patch: Patch) -> None:
    """Of the ranks that got the same key/value head, only the first one's gradient returns."""
    add = ulysses._add_to_heads

    def wrong(total: Tensor, heads: slice, part: Tensor) -> None:
        if not total[:, heads].any():
            add(total, heads, part)

    patch.setattr(ulysses, "_add_to_heads", wrong)


def _ring_pairs(patch: Patch, change: Callable[[TokenOrder, int, int, tuple[ring.Pair, ...]], tuple[ring.Pair, ...]]) -> None:
    right = ring.pairs
    patch.setattr(ring, "pairs", lambda order, mine, theirs, window: change(order, mine, theirs, right(order, mine, theirs, window)))


def _with_masks(patch: Patch, other: Mapping[Mask, Mask]) -> None:
    """Pieces with one mask are computed with another."""
    fold, add = Attention.fold, Attention.add

    def wrong(self: Attention, out, lse, q, k, v, mask: Mask, first: bool) -> None:
        fold(self, out, lse, q, k, v, other.get(mask, mask), first)

    def wrong_add(self: Attention, totals, grad, q, k, v, out, lse, mask: Mask) -> None:
        add(self, totals, grad, q, k, v, out, lse, other.get(mask, mask))

    patch.setattr(Attention, "fold", wrong)
    patch.setattr(Attention, "add", wrong_add)


def ring_not_causal(patch: Patch) -> None:
    """Queries see all keys of their own pieces."""
    _with_masks(patch, {"causal": "all"})


def ring_piece_off_by_one(patch: Patch) -> None:
    """Queries see the keys of a document's later piece on another rank in place of the earlier one's."""

    def change(order: TokenOrder, mine: int, theirs: int, found: tuple[ring.Pair, ...]) -> tuple[ring.Pair, ...]:
        def moved(keys: slice) -> slice:
            end = 2 * keys.stop - keys.start
            return slice(keys.stop, end) if end <= order.local_tokens else keys

        return found if mine == theirs else tuple((q, moved(k), mask) for q, k, mask in found)

    _ring_pairs(patch, change)


def ring_last_step_dropped(patch: Patch) -> None:
    """The keys that arrive last are not attended to."""
    _ring_pairs(patch, lambda order, mine, theirs, found: () if (mine - theirs) % len(order.runs) == len(order.runs) - 1 else found)


def ring_keys_for_values(patch: Patch) -> None:
    """Keys and values that have travelled change places."""
    fold, add = Attention.fold, Attention.add

    def wrong(self: Attention, out, lse, q, k, v, mask: Mask, first: bool) -> None:
        fold(self, out, lse, q, *((k, v) if mask == "causal" else (v, k)), mask, first)

    def wrong_add(self: Attention, totals, grad, q, k, v, out, lse, mask: Mask) -> None:
        dq, dk, dv = totals
        if mask == "causal":
            add(self, totals, grad, q, k, v, out, lse, mask)
        else:
            add(self, (dq, dv, dk), grad, q, v, k, out, lse, mask)

    patch.setattr(Attention, "fold", wrong)
    patch.setattr(Attention, "add", wrong_add)


# ---- streaming


def _streamed_pairs(patch: Patch, change: Callable[[ChunkPlayer, int, int, Sequence[ring.Pair]], Sequence[ring.Pair]]) -> None:
    """`change` sees queries of chunk c, keys of chunk j, and what they do."""
    right = ChunkPlayer._pairs
    patch.setattr(ChunkPlayer, "_pairs", lambda self, c, j: lambda sender: change(self, c, j, right(self, c, j)(sender)))


def _reach(patch: Patch, change: Callable[[int, int], int]) -> None:
    """`change`: a chunk and the first one that it sees, to another."""
    right = chunks.first_key_chunks
    patch.setattr(chunks, "first_key_chunks", lambda cut, window: tuple(change(c, first) for c, first in enumerate(right(cut, window))))


def streamed_scores_scaled_twice(patch: Patch) -> None:
    """Scores are divided by the square root of the head width before the kernel, which divides again."""
    init = ChunkedPacks.__init__

    def wrong(self: ChunkedPacks, *how, **named) -> None:
        init(self, *how, **named)
        self.ops.attention = replace(self.ops.attention, scale=self.ops.attention.scale**2)

    patch.setattr(ChunkedPacks, "__init__", wrong)


def uniform_attention_to_earlier_chunks(patch: Patch) -> None:
    """All scores of keys from earlier chunks are equal."""
    fold, add = Attention.fold, Attention.add
    blind = lambda q, mask: q if mask == "causal" else torch.zeros_like(q)  # noqa: E731
    patch.setattr(Attention, "fold", lambda self, out, lse, q, k, v, mask, first: fold(self, out, lse, blind(q, mask), k, v, mask, first))
    patch.setattr(Attention, "add", lambda self, totals, grad, q, *rest: add(self, totals, grad, blind(q, rest[-1]), *rest))


def chunk_sees_itself_whole(patch: Patch) -> None:
    """The causal mask stands one chunk too late: queries see all keys of their own chunk's piece."""
    _with_masks(patch, {"causal": "all"})


def first_chunk_not_seen(patch: Patch) -> None:
    """The causal reach stands one chunk too late: what a document wrote into its first chunk is forgotten."""
    _reach(patch, lambda c, first: min(first + 1, c))


def document_before_seen(patch: Patch) -> None:
    """Every chunk's first piece sees the last one of the chunk before, whatever document that is of."""
    _reach(patch, lambda c, first: min(first, max(0, c - 1)))


def nearest_pair_dropped(patch: Patch) -> None:
    """Queries skip the chunk before their own."""
    _streamed_pairs(patch, lambda play, c, j, found: [] if c - j == 1 else found)


def pair_without_backward(patch: Patch) -> None:
    """The farthest pair of a chunk is left out of the backward."""
    back = ChunkPlayer.attend_back

    def wrong(self: ChunkPlayer, event: Event) -> None:
        with pytest.MonkeyPatch.context() as inner:
            if event.keys == self.lists.first_keys[event.chunk] < event.chunk:
                inner.setattr(ChunkPlayer, "_pairs", lambda self, c, j: lambda sender: [])
            back(self, event)

    patch.setattr(ChunkPlayer, "attend_back", wrong)


def window_one_too_wide(patch: Patch) -> None:
    """Every token sees one token more than its window."""
    right = ModelSpec.window
    patch.setattr(ModelSpec, "window", lambda self, block: (right(self, block) or 0) + 1 or None)


def rows_of_the_last_block_lost(patch: Patch) -> None:
    """Where the loss is computed in blocks of rows, the last block's labels are forgotten."""
    right = runner_module._rows

    def wrong(head: Head, x: Tensor, micro: MicroBatch, number: int) -> tuple[slice, Tensor]:
        here, labels = right(head, x, micro, number)
        return here, torch.full_like(labels, IGNORE) if number and here.stop >= len(x) else labels

    patch.setattr(runner_module, "_rows", wrong)


def early_updates_kept(patch: Patch) -> None:
    """What was updated before the norm stays where the norm is clipped, and the clipped update is added."""

    def wrong(self: Optimizer) -> None:
        for shard in self._of(self._early):
            shard.take_second_places()
        self._early = set()

    patch.setattr(Optimizer, "take_back", wrong)


def adapter_scaled_by_alpha(patch: Patch) -> None:
    """Adapters are multiplied with alpha, not with alpha / rank."""
    patch.setattr(Lora, "scale", property(lambda self: self.alpha))


def label_lost_at_a_cut(patch: Patch) -> None:
    """The last token of a piece of a document that was cut has no label."""
    right = batch_module.document_from_ids

    def wrong(ids: np.ndarray, max_len: int | None = None, learned: np.ndarray | None = None) -> Document:
        found = right(ids, max_len, learned)
        found.labels[-1] = IGNORE
        return found

    patch.setattr(batch_module, "document_from_ids", wrong)


def answers_and_prompts_learned(patch: Patch) -> None:
    """All tokens of a conversation are learned."""
    right = batch_module.document_from_ids
    patch.setattr(batch_module, "document_from_ids", lambda ids, max_len=None, learned=None: right(ids, max_len))


def window_in_every_block(patch: Patch) -> None:
    """Blocks that attend to all of a document attend to a window too."""
    patch.setattr(ModelSpec, "window", lambda self, block: self.sliding_window)


def later_keys_dropped(patch: Patch) -> None:
    """The window ends with the block of queries."""
    right = windows.pieces
    fewer = lambda *given: (piece for piece in right(*given) if piece[2] != "later")  # noqa: E731
    for module in (sequence, attention_module):
        patch.setattr(module, "pieces", fewer)


def later_keys_not_turned(patch: Patch) -> None:
    """The piece before the block of queries is computed with the causal mask, in the order of the document."""
    _with_masks(patch, {"later": "causal"})


def window_ends_a_chunk_early(patch: Patch) -> None:
    """The earliest chunk that a window reaches is not seen."""
    _reach(patch, lambda c, first: min(first + 1, c))


def window_turns_by_the_other_angles(patch: Patch) -> None:
    """Blocks with a window have the rotary embedding of those without."""
    patch.setattr(ModelSpec, "rope_of", lambda self, block: self.rope)


def norms_multiply_with_what_is_stored(patch: Patch) -> None:
    """The one that Gemma's weights of norms are stored without is not added."""
    patch.setattr(Unit, "norm_weight", lambda self, role: getattr(self, role))


def gradients_of_keys_through_bf16(patch: Patch) -> None:
    """What all queries add to dK and dV is kept in bfloat16 between pairs."""
    back = ChunkPlayer.attend_back
    patch.setattr(ChunkPlayer, "attend_back", lambda self, event: (back(self, event), _through_bf16(self._one("dkv", event.keys))))


def positions_start_again_with_a_chunk(patch: Patch) -> None:
    """A document that goes on in a chunk begins there at position 0."""
    right = micro_module.share
    patch.setattr(micro_module, "share", lambda documents, layout, rank, starts=None: right(documents, layout, rank))


def last_chunk_dropped(patch: Patch) -> None:
    """The last chunk, which may be short, is left out."""
    right = chunks.cut_chunks
    patch.setattr(micro_module, "cut_chunks", lambda lengths, tokens: right(lengths, tokens)[:-1] or right(lengths, tokens))


def stale_fetch(patch: Patch) -> None:
    """A fetch gives what the one before it brought, where that had the same shapes."""
    right = DiskTier.fetch
    before: dict[tuple, Tensors] = {}

    def wrong(self: DiskTier, key: tuple) -> Callable[[], Tensors]:
        wait = right(self, key)

        def stale() -> Tensors:
            new = wait()
            shapes = tuple((tensor.shape, tensor.dtype) for tensor in new)
            old = before.get(shapes, new)
            before[shapes] = tuple(tensor.clone() for tensor in new)
            return old

        return stale

    patch.setattr(DiskTier, "fetch", wrong)


def replayed_with_the_next_blocks_weights(patch: Patch) -> None:
    """The forward that is played again before a backward is that of the block after."""
    compute, init = ChunkedPacks.compute, ChunkPlayer.__init__
    passed, turns = set[int](), list[str]()

    def noted(self: ChunkedPacks, op: Op) -> None:
        turns.append(op.turn)
        passed.update({op.unit} if op.turn.startswith("pass") else ())
        compute(self, op)

    def wrong(self: ChunkPlayer, runner: ChunkedPacks, unit: int, micro: int) -> None:
        init(self, runner, unit, micro)
        if turns[-1] == "forward" and unit + 1 in passed:
            self.module = runner.modules[unit + 1]

    patch.setattr(ChunkedPacks, "compute", noted)
    patch.setattr(ChunkPlayer, "__init__", wrong)


def output_of_another_micro_batch(patch: Patch) -> None:
    """A block that is computed again takes the output of attention that the last pass kept, whichever micro-batch that was of."""
    native, again = WholePacks._pass, WholePacks._again
    last: dict[int, Tensor] = {}

    def passed(self: WholePacks, op: Op) -> None:
        native(self, op)
        last[op.unit] = self.inputs[self._key(op)][1]

    def wrong(self: WholePacks, op: Op) -> None:
        x, out, lse = self.inputs[self._key(op)]
        stale = torch.zeros_like(out)
        count = min(len(out), len(last[op.unit]))
        stale[:count] = last[op.unit][:count]
        self.inputs[self._key(op)] = x, stale, lse
        again(self, op)

    def turns(self: WholePacks, *how, **named) -> None:
        init(self, *how, **named)
        self.turns |= {"pass": self._pass, "again": self._again}

    init = WholePacks.__init__
    patch.setattr(WholePacks, "_pass", passed)
    patch.setattr(WholePacks, "_again", wrong)
    patch.setattr(WholePacks, "__init__", turns)


# ---- switching


def divisor_of_the_group(patch: Patch) -> None:
    """Every group divides by its own target tokens."""

    def seed(player: Player, visit: int, layout: Layout) -> float:
        documents = player.groups_here[visit].documents
        return 1 / max(1, sum(player.lengths[d] - 1 for d in documents))

    _seeds(patch, seed)


def visit_with_stale_weights(patch: Patch) -> None:
    """A layout that was visited in an earlier step computes with what it got then."""

    def change(player: Player, number: int, program: Program) -> Program:
        brings = [op for op in program if op.way == "weights" or op.kind in ("open", "arrived")] if number else []
        return tuple(op for op in program if op.kind != "close" and op not in brings)

    _programs(patch, change, scores=True)


def last_groups_gradients_only(patch: Patch) -> None:
    """Gradients that come home replace those of the groups before."""
    total = Switches.total
    patch.setattr(Switches, "total", lambda self, unit: (self.home.drop_gradients(), total(self, unit)))


def gradients_of_replicas_not_summed(patch: Patch) -> None:
    """Gradients go home as weights come: copied, not added."""
    patch.setattr(Plan, "reversed", lambda self: replace(reverse(self), sums=False))


def gradients_home_in_bf16(patch: Patch) -> None:
    """Gradients of a visited layout cross the wire in bfloat16."""
    put = SwitchTransfer._put

    def wrong(self: SwitchTransfer, targets: list[Tensor], sources: list[Tensor]) -> None:
        put(self, targets, [source.bfloat16().to(source.dtype) for source in sources] if self.plan.sums else sources)

    patch.setattr(SwitchTransfer, "_put", wrong)


def door_forgets_its_own(patch: Patch) -> None:
    """A rank that gathers its node's gradients sends on the others', not its own."""
    target = SwitchTransfer._target

    def wrong(self: SwitchTransfer, move: Move, bucket: int, which: int) -> Tensor:
        found = target(self, move, bucket, which)
        return found.zero_() if self.plan.sums and which < self.plan.rounds - 1 else found

    patch.setattr(SwitchTransfer, "_target", wrong)


def sums_kept_for_the_next_step(patch: Patch) -> None:
    """Gradient sums of a visited layout are not dropped when they are at home."""
    _programs(patch, lambda player, number, program: tuple(op for op in program if op.kind != "forget"))


def group_of_short_documents_skipped(patch: Patch) -> None:
    """The first group, of which there may be little, is left out."""
    groups_of = Player.groups
    patch.setattr(Player, "groups", lambda self, lengths: tuple(g for g in groups_of(self, lengths) if g.lo) or groups_of(self, lengths))


# ---- streams, which show in a model of CUDA alone (`test_collective_streams`)


def memory_of_collectives_not_kept(patch: Patch) -> None:
    """What a collective reads and writes is given back when nothing else needs it, ended or not."""
    begin = Pending.__init__
    patch.setattr(Pending, "__init__", lambda self, works=(), keep=(), finish=None: begin(self, works, (), finish))


def exchange_read_before_it_ends(patch: Patch) -> None:
    """A switch takes what it is sent without a wait for it."""
    take_in = SwitchTransfer.take_in

    def wrong(self: SwitchTransfer, number: int) -> None:
        if self.arriving is not None:
            self.arriving = Pending(keep=self.arriving[0].keep), self.arriving[1]
        take_in(self, number)

    patch.setattr(SwitchTransfer, "take_in", wrong)


STREAM_MUTANTS = (memory_of_collectives_not_kept, exchange_read_before_it_ends)


@dataclass(frozen=True)
class Case:
    """A mutant under some layouts. `at_least`: the difference it makes in `steps` steps, well below what it was measured to be."""

    mutant: Callable[[Patch], None]
    layouts: tuple[str, ...]
    family: str = "llama"
    steps: int = 2
    at_least: float = 1e-4


CASES = (
    Case(mean_of_means, ("dp2",)),
    Case(leftover_documents_dropped, ("dp2",)),
    Case(gradient_times_sequence_degree, ("tp2", "u2", "ring2")),
    Case(loss_counted_by_every_tensor_rank, ("tp2",)),
    Case(score_counted_by_every_tensor_rank, ("tp2",)),
    Case(score_without_the_last_rows, ("u2.chunk13.disk",)),
    Case(micro_batches_overwrite, ("dp2", "pp2")),
    Case(products_overwrite, ("dp2", "dp2.z3.vertical", "chunk13.disk.kv-offload")),
    Case(tokens_share_a_scale, ("u2", "dp2", "chunk13.disk.kv-offload"), "float8", at_least=1e-9),
    Case(slices_have_a_scale, ("tp2",), "float8", at_least=1e-9),
    Case(last_micro_batch_added_up_a_step_later, ("dp2.z1", "pp2")),
    Case(reduced_before_the_last_micro_batch, ("dp2.z1", "pp2", "dp2.z3.vertical")),
    Case(no_document_mask, ("dp2", "u2", "tp2")),
    Case(positions_not_reset, ("dp2", "ring2"), "gpt2"),
    Case(label_lost_at_shard_edge, ("u2",)),
    Case(labels_shifted_inside_shards, ("u2", "ring2")),
    Case(labels_shifted_twice, ("dp2", "ring2")),
    Case(padding_read_as_data, ("u2", "ring2", "dp4")),
    Case(norm_gradients_not_reduced, ("tp2", "u2", "ring2", "dp2")),
    Case(adapter_gradients_not_reduced, ("tp2",), "lora"),
    Case(adapter_gradients_not_scaled, ("dp2", "u2.chunk16.disk"), "lora"),
    Case(adapter_without_gradient_of_its_input, ("tp2", "chunk13.disk.kv-offload"), "lora"),
    Case(shared_head_gradients_not_reduced, ("tp4",)),
    Case(tied_gradient_not_summed_over_stages, ("pp2",), "llama-tied"),
    Case(tied_head_gradient_dropped, ("dp2", "pp2"), "llama-tied"),
    Case(average_for_sum, ("dp2", "dp2.z2")),
    Case(one_gradient_sent_twice, ("dp2", "u2.z1")),
    Case(clip_by_local_norm, ("dp2.z1", "tp2", "pp2")),
    Case(adam_step_reset, ("dp2.z1",), steps=5),
    Case(first_moment_reset, ("dp2.z1",), steps=5),
    Case(second_moment_reset, ("dp2.z1",), steps=5),
    Case(momentum_reset, ("dp2.z1", "pp2"), "sgd", steps=5),
    Case(master_through_bf16, ("dp2.z1",), steps=5, at_least=1e-6),
    Case(moments_through_bf16, ("dp2.z1",), steps=5, at_least=1e-6),
    Case(gradients_through_bf16, ("dp2.z1",)),
    Case(never_gathered_again, ("dp2.z1", "u2.z3", "pp2.dp2.z3")),
    Case(one_stale_prefetch, ("dp2.z1",), at_least=1e-6),
    Case(slices_in_wrong_order, ("dp2.tp2.z1", "dp2.tp2.z3")),
    Case(fused_qkv_cut_as_one, ("tp2",), "gpt2"),
    Case(row_bias_on_every_rank, ("tp2",), "gpt2"),
    Case(ulysses_keys_for_values, ("u2",)),
    Case(ulysses_one_gradient_of_shared_heads, ("u4",)),
    Case(ring_not_causal, ("ring2",)),
    Case(ring_piece_off_by_one, ("ring2",)),
    Case(ring_last_step_dropped, ("ring2", "ring3")),
    Case(ring_keys_for_values, ("ring2",)),
    Case(streamed_scores_scaled_twice, ("chunk16.fpdt",)),
    Case(uniform_attention_to_earlier_chunks, ("chunk13.disk.kv-offload",)),
    Case(chunk_sees_itself_whole, ("chunk16.fpdt",)),
    Case(first_chunk_not_seen, ("chunk13.disk.kv-offload", "ring2.chunk16.fpdt")),
    Case(document_before_seen, ("chunk13.disk.kv-offload",)),
    Case(nearest_pair_dropped, ("chunk16.fpdt",)),
    Case(pair_without_backward, ("chunk13.disk.kv-offload", "chunk16.fpdt")),
    Case(ring_keys_for_values, ("chunk16.fpdt",)),
    Case(window_one_too_wide, ("dp2", "ring2", "u2.chunk16.disk"), "mistral"),
    Case(window_in_every_block, ("tp2", "chunk13.disk.kv-offload"), "qwen2"),
    Case(later_keys_dropped, ("dp2", "ring3", "chunk16.fpdt"), "mistral"),
    Case(later_keys_not_turned, ("u2", "ring2", "chunk13.disk.kv-offload"), "gemma3"),
    Case(window_ends_a_chunk_early, ("chunk7.disk.kv-offload", "ring2.chunk16.fpdt"), "mistral"),
    Case(window_turns_by_the_other_angles, ("dp2", "u2.chunk16.disk"), "gemma3"),
    Case(norms_multiply_with_what_is_stored, ("tp2",), "gemma3"),
    Case(gradients_of_keys_through_bf16, ("chunk13.disk.kv-offload", "chunk16.fpdt")),
    Case(label_lost_at_shard_edge, ("chunk16.fpdt", "u2.chunk16.disk")),
    Case(labels_shifted_inside_shards, ("chunk13.disk.kv-offload",)),
    Case(padding_read_as_data, ("u2.chunk16.disk",)),
    Case(positions_start_again_with_a_chunk, ("u2.chunk16.disk",)),
    Case(positions_start_again_with_a_chunk, ("chunk16.fpdt",), "gpt2"),
    Case(last_chunk_dropped, ("chunk13.disk.kv-offload",)),
    Case(stale_fetch, ("chunk13.disk.kv-offload", "u2.chunk16.disk")),
    Case(replayed_with_the_next_blocks_weights, ("chunk13.every2", "u2.chunk16.every3.disk")),
    Case(output_of_another_micro_batch, ("pp2.gpipe.recompute-full",)),
    Case(divisor_of_the_group, ("dp4 > tp4",)),
    Case(visit_with_stale_weights, ("dp4 > tp4",), steps=3),
    Case(last_groups_gradients_only, ("dp4 > tp4",)),
    Case(gradients_of_replicas_not_summed, ("dp4 > tp4",)),
    Case(gradients_home_in_bf16, ("dp4 > tp4",)),
    Case(sums_kept_for_the_next_step, ("dp4 > tp4",)),
    Case(door_forgets_its_own, ("dp4 > pp2.tp2",)),
    Case(group_of_short_documents_skipped, ("dp4 > tp4",)),
)
