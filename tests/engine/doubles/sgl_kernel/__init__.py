"""Plain torch in the place of sgl-kernel's CPU build, which no package index has.

It holds what SGLang calls to serve a Llama with an EAGLE chain (top-k 1) on a CPU, and refuses
the rest by name. Whole batches are computed at once; it is meant to be right, not fast.

A `table` has a row for each running request, with the cache slots of its tokens in order; `rows`
are those of a batch.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Let SGLang import what it does not call on a CPU."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_arguments: object, **_named: object) -> NoReturn:
        raise NotImplementedError(f"this double of sgl_kernel has no {name}")

    return missing


# Cache slots


def assign_req_to_token_pool_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, _width: int
) -> None:
    """Write slots into each row, from its start to its end."""
    place = _spans(rows, starts, ends)
    table[place] = slots[: place[0].numel()].to(table.dtype)


def assign_extend_cache_locs_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, _width: int
) -> None:
    """Read the slots of each row, from its start to its end."""
    place = _spans(rows, starts, ends)
    slots[: place[0].numel()] = table[place].to(slots.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    rows: Tensor, table: Tensor, lengths: Tensor, slots: Tensor, _width: int, topk: int, steps: int
) -> None:
    """Read the slots of each row's drafts, which follow its tokens."""
    place = _spans(rows, lengths, lengths + topk * steps)
    slots[: place[0].numel()] = table[place].to(slots.dtype)


def copy_all_layer_kv_cache_cpu(
    addresses: Tensor, sizes: Tensor, targets: Tensor, sources: Tensor
) -> None:
    """Copy tokens to other slots, in the caches of all layers.

    Args:
        addresses: Where each cache begins.
        sizes: Bytes of a slot in each.
        targets: Slots to write.
        sources: Slots to read, before any is written.
    """
    for start, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
        read = [ctypes.string_at(start + slot * size, size) for slot in sources.tolist()]
        for slot, content in zip(targets.tolist(), read, strict=True):
            ctypes.memmove(start + slot * size, content, size)


def _spans(rows: Tensor, starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and columns of all cells from each row's start to its end, in order."""
    counts = (ends - starts).long()
    before = counts.cumsum(0) - counts
    columns = torch.arange(int(counts.sum())) + (starts - before).repeat_interleave(counts)
    return rows.long().repeat_interleave(counts), columns


# Drafts and their verification


def build_draft_decode_metadata_cpu(
    table: Tensor, rows: Tensor, _lengths: Tensor, topk: int, _steps: int, _width: int
) -> Tensor:
    """Return a table with a row for each branch of a draft: a chain has one."""
    _only_chains(topk)
    return table[rows.long()]


def build_tree_kernel_efficient_cpu(
    _parents: Tensor,
    _selected: Tensor,
    lengths: Tensor,
    _mask: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    _steps: int,
    count: int,
    _mask_mode: int,
) -> None:
    """Describe the drafts to be verified as a tree: in a chain each token has one child."""
    _only_chains(topk)
    batch, place = lengths.numel(), torch.arange(count)
    positions.view(batch, count).copy_(lengths.long()[:, None] + place)
    index.copy_(torch.arange(batch * count).view(batch, count))
    next_token.copy_(torch.where(place < count - 1, place + 1, -1).expand(batch, count))
    next_sibling.fill_(-1)


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Keep each chain's drafts up to the first that the target would not have chosen."""
    del retrive_next_token, retrive_next_sibling
    batch, count = candidates.shape
    chosen = target_predict.view(batch, count)
    kept = (candidates[:, 1:] == chosen[:, :-1]).long().cumprod(1)
    accept_token_num.copy_(kept.sum(1))
    reached = functional.pad(kept, (1, 0), value=1).bool()
    predicts[retrive_index[reached].long()] = chosen[reached].to(predicts.dtype)
    accept_index.copy_(torch.where(reached, retrive_index, -1))


def fill_bonus_tokens_cpu(accepted: Tensor, counts: Tensor, bonus: Tensor, stride: int) -> None:
    """Return each request's last accepted token."""
    last = torch.arange(counts.numel()) * stride + counts.long() - 1
    bonus.copy_(accepted.flatten()[last])


def fill_accept_out_cache_loc_cpu(index: Tensor, slots: Tensor, accepted: Tensor) -> None:
    """Gather the slots of all accepted tokens at the front."""
    chosen = index[index > -1].long()
    accepted[: chosen.numel()] = slots[chosen]


def _only_chains(topk: int) -> None:
    if topk != 1:
        raise NotImplementedError(f"this double of sgl_kernel has chains only, not top-k {topk}")


# Attention


def decode_attention_cpu(query: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> None:
    """Attend with one new token a request, whose key and value are stored first."""
    out, key, value, slots, _, table, rows, lengths, scale, *_ = _without_scales(rest)
    if key is not None:
        keys[slots.long()] = key.view(-1, *keys.shape[1:]).to(keys.dtype)
        values[slots.long()] = value.view(-1, *values.shape[1:]).to(values.dtype)
    seen = table[rows.long(), : int(lengths.max())].long()
    visible = torch.arange(seen.shape[1]) < lengths[:, None]
    out.copy_(_attend(query[:, None], keys[seen], values[seen], visible[:, None], scale)[:, 0])


def extend_attention_cpu(
    query: Tensor,
    _key: Tensor | None,
    _value: Tensor | None,
    out: Tensor,
    keys: Tensor,
    values: Tensor,
    *rest: Any,
) -> None:
    """Attend causally with any number of new tokens a request, which are stored already."""
    table, rows, lengths, counts, starts, _, scale, _, crossed, *_ = _without_scales(rest)
    if crossed:
        raise NotImplementedError("this double of sgl_kernel has no attention across")
    seen = table[rows.long(), : int(lengths.max())].long()
    # Requests have different numbers of new tokens: put each in a row of the longest one's.
    request, place = _spans(torch.arange(rows.numel()), torch.zeros_like(counts), counts)
    flat = starts.long()[request] + place
    padded = query.new_zeros(rows.numel(), int(counts.max()), *query.shape[1:])
    padded[request, place] = query[flat]
    last = (lengths - counts)[:, None] + torch.arange(padded.shape[1])
    visible = torch.arange(seen.shape[1]) <= last[:, :, None]
    out[flat] = _attend(padded, keys[seen], values[seen], visible, scale)[request, place]


def _without_scales(rest: tuple[Any, ...]) -> tuple[Any, ...]:
    """Leave out the scales of quantised caches, which SGLang 0.5.23 added."""
    return rest[2:] if isinstance(rest[0], float) else rest


def _attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Return what each new token of a batch sees; all have (request, token, head, size)."""
    heads = functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        keys.to(query.dtype).transpose(1, 2),
        values.to(query.dtype).transpose(1, 2),
        attn_mask=visible[:, None],
        scale=scale,
        enable_gqa=True,
    )
    return heads.transpose(1, 2)


# SGLang looks these two up among torch's operators; a function there is as good as an operator.
torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu
