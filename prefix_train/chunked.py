"""The gated delta rule in chunks, in plain torch: the reference on every device, and what trains on CPU.

Same mathematics as transformers' `torch_chunk_gated_delta_rule`: within a chunk of C tokens the updates of the state
are condensed into one unit-triangular system, and the state is carried from chunk to chunk. Here the segments of a
group run together, longest first, so that step i works on the i-th chunk of those segments that have one (R chunks in
all). Padding has g = 0 and beta = 0, which leaves the state as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_train.groups import Group

SUMS = torch.float64
"""Of the decays within a chunk: behind a few fast ones the sums are large, their differences and gradients small."""


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, group: Group
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule over the segments of a group, all in one dtype (float32 or float64).

    query: [1, n, HV, K], normalised and scaled. key: [1, n, HV, K], normalised. value: [1, n, HV, V]. g, beta:
    [1, n, HV]. state: [segments, HV, K, V] or None for zeros.
    Returns the output [1, n, HV, V] and the final states of `group.keep`, None where there are none.
    """
    sizes = [query.shape[-1], key.shape[-1], value.shape[-1], 1, 1]
    together = torch.cat([query[0], key[0], value[0], g[0, :, :, None], beta[0, :, :, None]], -1)
    query, key, value, g, beta = torch.split(_into_chunks(together, group), sizes, -1)
    decay = g.squeeze(-1).to(SUMS).cumsum(-1)
    since_start = decay.to(g.dtype).exp()[..., None]
    until_end = (decay[..., -1:] - decay).to(g.dtype).exp()[..., None]
    later = torch.ones(group.chunk, group.chunk, dtype=torch.bool, device=key.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).to(g.dtype).masked_fill(later, float("-inf")).exp()

    keyed = key * beta
    system = (keyed @ key.mT) * between
    right = torch.cat([value * beta, keyed * since_start], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    update, reading = torch.split(solved, [sizes[2], sizes[1]], -1)
    reading = torch.cat([reading, query * since_start], -2)
    writing = (key * until_end).mT
    if state is None:
        state = value.new_zeros(len(group.segments), key.shape[1], sizes[1], sizes[2])
    else:
        state = state.index_select(0, group.by_length)
    update, read, final = _carry(reading, update, writing, since_start[..., -1:, :], state, group)
    out = read + ((query @ key.mT) * between) @ update
    return _from_chunks(out, group)[None], final


def _carry(
    reading: Tensor, update: Tensor, writing: Tensor, decay: Tensor, state: Tensor, group: Group
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Carry the state from chunk to chunk.

    reading: [R, HV, 2C, K], what a chunk's updates and its outputs take from the state before it. update: [R, HV, C,
    V], as if that state were zero. writing: [R, HV, K, C], how updates enter the state after it. decay: [R, HV, 1, 1].
    Returns the true updates, what the outputs read, both [R, HV, C, V], and the final states of `group.keep`.
    """
    updates, reads, finals = [], [], []
    steps = [torch.split(part, list(group.active)) for part in (reading, update, writing, decay)]
    for step, (reading, update, writing, decay) in enumerate(zip(*steps, strict=True)):
        old, read = (reading @ state).chunk(2, -2)
        update = update - old
        updates.append(update)
        reads.append(read)
        going_on = group.active[step + 1] if step + 1 < len(group.active) else 0
        if group.stored or going_on:
            state = state * decay + writing @ update
            state, final = torch.split(state, [going_on, len(state) - going_on])
            finals.append(final)
    kept = torch.cat(finals[::-1]).index_select(0, group.keep_by_length) if group.stored else None
    return torch.cat(updates), torch.cat(reads), kept


def _into_chunks(x: Tensor, group: Group) -> Tensor:
    """[tokens, HV, F] -> [R, HV, C, F], zeros where a segment's last chunk is not full."""
    rows = sum(group.active) * group.chunk
    padded = x.new_zeros(rows, *x.shape[1:]).index_copy(0, group.slots, x)
    return padded.view(-1, group.chunk, *x.shape[1:]).transpose(1, 2)


def _from_chunks(x: Tensor, group: Group) -> Tensor:
    """[R, HV, C, F] -> [tokens, HV, F]."""
    return x.transpose(1, 2).flatten(0, 1).index_select(0, group.slots)
