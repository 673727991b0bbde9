"""Ring attention: keys and values travel round the ranks, rows stay, and each rank merges the results of its rows.

Forward, on the rank with the rows Q, over the chunks of keys and values (K_c, V_c) that it gets:

    O_c, lse_c = attention(Q, K_c, V_c)          lse = log sum_c exp(lse_c)          O = sum_c exp(lse_c - lse) O_c

Backward: given lse and delta of whole rows, the gradients of a chunk follow from that chunk alone. They are summed
along its route (schedule.py):

    P_c = exp(S_c - lse)     dS_c = P_c (dP_c - delta)     delta = rowsum(dO O) - dlse

Ring Attention: Liu, Zaharia and Abbeel, 2023; the merge by lse and the backward are FlashAttention's (Dao et al., 2022,
appendix B). O is merged and gradients are summed in float32 (float64 for float64), in an order that depends on shapes
alone. While a rank computes with one chunk, it receives the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._load import OPS
from .._torch.inputs import QKV_GRADIENTS, backward_arguments
from ..merge import merge_states
from . import transport
from .schedule import Chunk, Schedule
from .transport import Message

_forward = OPS.sdpa_recorded.default
_backward = OPS.sdpa_backward.default

Shapes = list[tuple[Sequence[int], torch.dtype]]


@dataclass(frozen=True)
class Job:
    """One call: its schedule, and its arguments that are not tensors."""

    schedule: Schedule
    group: Any
    rank: int
    first_head: int  # of the heads that are here, among `heads`
    heads: int
    options: dict[str, Any]  # the op's arguments by name, from dropout_p on; those left out have their default

    def is_next(self, rank: int) -> bool:
        """Whether `rank` is the next one in the ring."""
        return rank == (self.rank + 1) % self.schedule.ranks

    def part(self, rows: Chunk, keys: Chunk) -> list[int]:
        """The op's `part` for a pair of chunks: where its positions, and its heads for dropout, begin."""
        diagonal = self.schedule.reach.diagonal + rows.run.begin - keys.run.begin
        return [diagonal, rows.run.begin, keys.run.begin, 0, self.first_head, self.heads]


@dataclass
class _Block:
    """A chunk of keys that this rank has.

    key: (B, Hkv, l, D); value: (B, Hkv, l, Dv); mask: (B, 1, 1, l), True = may attend.
    """

    key: Tensor
    value: Tensor
    mask: Tensor | None


def _slice(tensor: Tensor, chunk: Chunk, dim: int = 2) -> Tensor:
    return tensor.narrow(dim, chunk.at, chunk.length)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Circulation:
    """Yields the chunks of keys and values that this rank needs, step after step, while it receives the next ones."""

    def __init__(self, job: Job, key: Tensor, value: Tensor, key_mask: Tensor | None) -> None:
        self.job, self.key, self.value, self.key_mask = job, key, value, key_mask
        self.outbox = transport.Outbox(job.group, "keys_values")
        self.step = 0

    def _shapes(self, chunk: Chunk) -> Shapes:
        batch, heads = self.key.shape[:2]
        shapes: Shapes = [
            ((batch, heads, chunk.length, self.key.shape[3]), self.key.dtype),
            ((batch, heads, chunk.length, self.value.shape[3]), self.value.dtype),
        ]
        if self.key_mask is not None:
            shapes.append(((batch, 1, 1, chunk.length), torch.bool))
        return shapes

    def _own(self, chunk: Chunk) -> _Block:
        mask = None if self.key_mask is None else _slice(self.key_mask, chunk, 1)[:, None, None]
        return _Block(_slice(self.key, chunk), _slice(self.value, chunk), mask)

    def _expect(self, step: int) -> tuple[list[Any], list[tuple[Chunk, Tensor]]]:
        """Posts the receives for the chunks of a step."""
        job, rank = self.job, self.job.rank
        chunks = job.schedule.step(rank, step) if 0 < step < job.schedule.ranks else []
        arriving = [
            (chunk, self.key.new_empty(transport.size_in_bytes(self._shapes(chunk)), dtype=torch.uint8))
            for chunk in chunks
        ]
        receives = []
        for chunk, data in arriving:
            source = job.schedule.before(rank, chunk)
            assert source is not None
            receives.append(Message(data, source, chunk.number))
        return transport.post([], receives, job.group, "keys_values"), arriving

    def _pass_on(self, chunk: Chunk, data: Tensor | None) -> None:
        job = self.job
        target = job.schedule.after(job.rank, chunk)
        if target is None:
            return
        if data is None:
            own = self._own(chunk)
            data = transport.pack([own.key, own.value] if own.mask is None else [own.key, own.value, own.mask])
        self.outbox.send(Message(data, target, chunk.number), self.step, job.is_next(target))

    def __iter__(self) -> Any:
        """Pairs (chunk, block), in the order of steps."""
        job = self.job
        works, arriving = self._expect(1)
        for chunk in job.schedule.keys[job.rank]:
            self._pass_on(chunk, None)
        for chunk in job.schedule.step(job.rank, 0):
            yield chunk, self._own(chunk)
        for step in range(1, job.schedule.ranks):
            self.step = step
            transport.wait(works)
            self.outbox.settle(step)
            here = arriving
            works, arriving = self._expect(step + 1)
            for chunk, data in here:
                self._pass_on(chunk, data)
            for chunk, data in here:
                key, value, *mask = transport.unpack(data, self._shapes(chunk))
                yield chunk, _Block(key, value, mask[0] if mask else None)
        self.outbox.close()


def circulate(job: Job, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> None:
    """Runs the transfers of a forward pass without its computation."""
    for _ in _Circulation(job, key, value, key_mask):
        pass


def _attend(
    job: Job,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, lse, output_low): what rounding takes off the output, for the backward; empty if it is not saved."""
    wide, held = _wide(query.dtype), job.schedule.rows[job.rank]
    saves = OPS.may_save_output_low(query.dtype)
    states: dict[int, tuple[Tensor, Tensor]] = {}
    for chunk, block in _Circulation(job, key, value, key_mask):
        for rows in job.schedule.pairs(job.rank, chunk):
            with transport.timed("computing"):
                output, lse, _, low = _forward(
                    _slice(query, rows),
                    block.key,
                    block.value,
                    attn_mask=block.mask,
                    alibi_slopes=alibi_slopes,
                    dropout_seed=seed,
                    part=job.part(rows, chunk),
                    save_output_low=saves,
                    **job.options,
                )
                output = output.to(wide)
                if saves:
                    output += low
                known = states.get(rows.number)
                states[rows.number] = merge_states(*known, output, lse) if known else (output, lse)
    batch, heads, length = query.shape[:3]
    # In memory (B, L, H, Dv), as the op lays it out.
    output = query.new_zeros(batch, length, heads, value.shape[3]).transpose(1, 2)
    lse = query.new_full((batch, heads, length), -torch.inf, dtype=wide)
    output_low = torch.zeros_like(output) if saves else query.new_empty(0)
    for rows in held:
        if rows.number in states:
            exact, its_lse = states[rows.number]
            _slice(lse, rows).copy_(its_lse)
            rounded = _slice(output, rows).copy_(exact)
            if saves:
                _slice(output_low, rows).copy_((exact - rounded).nan_to_num_(0.0, 0.0, 0.0))
    return output, lse, output_low


class _Sums:
    """The gradients of keys and values in a pass: each rank on a chunk's route adds its part and passes the sum on."""

    def __init__(self, job: Job, key: Tensor, value: Tensor) -> None:
        wide = _wide(key.dtype)
        self.job, self.key, self.value = job, key, value
        self.grad_key, self.grad_value = (torch.zeros_like(t, dtype=wide) for t in (key, value))
        self.outbox = transport.Outbox(job.group, "gradients")
        self.returning: list[tuple[Chunk, Tensor, list[Any]]] = []
        first_tag = job.schedule.count  # after those of keys and values
        for chunk in job.schedule.keys[job.rank]:
            route = job.schedule.route(chunk)
            if route and route[-1] != job.rank:
                data = self._empty(chunk)
                message = Message(data, route[-1], first_tag + chunk.number)
                self.returning.append((chunk, data, transport.post([], [message], job.group, "gradients")))

    def _shapes(self, chunk: Chunk) -> Shapes:
        batch, heads = self.key.shape[:2]
        wide = self.grad_key.dtype
        return [((batch, heads, chunk.length, t.shape[3]), wide) for t in (self.key, self.value)]

    def _empty(self, chunk: Chunk) -> Tensor:
        return self.key.new_empty(transport.size_in_bytes(self._shapes(chunk)), dtype=torch.uint8)

    def expect(self, chunk: Chunk) -> tuple[Tensor, list[Any]] | None:
        """Posts the receive for the sum of the ranks before this one; None if there are none."""
        job = self.job
        route = job.schedule.route(chunk)
        place = route.index(job.rank)
        if place == 0:
            return None
        data = self._empty(chunk)
        message = Message(data, route[place - 1], 2 * job.schedule.count + chunk.number)
        return data, transport.post([], [message], job.group, "gradients")

    def add(self, chunk: Chunk, parts: list[tuple[Tensor, Tensor]], before: tuple[Tensor, list[Any]] | None) -> None:
        """Adds the parts of this rank to the sum so far, and sends it to the next rank, or at the end to the owner."""
        job, step = self.job, (self.job.rank - chunk.owner) % self.job.schedule.ranks
        self.outbox.settle(step)
        wide = self.grad_key.dtype
        total = [t.to(wide) for t in parts[0]]
        for part in parts[1:]:
            total = [a + b for a, b in zip(total, part, strict=True)]
        if before is not None:
            data, works = before
            transport.wait(works)
            total = [a + b for a, b in zip(transport.unpack(data, self._shapes(chunk)), total, strict=True)]
        target = job.schedule.after(job.rank, chunk)
        if target is None and job.rank == chunk.owner:
            self._store(chunk, total)
            return
        home = target is None
        data = transport.pack(total)
        tag = (1 if home else 2) * job.schedule.count + chunk.number
        message = Message(data, chunk.owner if target is None else target, tag)
        # An owner posts the receive for the final sum at the start of the pass.
        self.outbox.send(message, step, home or job.is_next(message.peer))

    def _store(self, chunk: Chunk, total: Sequence[Tensor]) -> None:
        _slice(self.grad_key, chunk).copy_(total[0])
        _slice(self.grad_value, chunk).copy_(total[1])

    def finish(self) -> tuple[Tensor, Tensor]:
        for chunk, data, works in self.returning:
            transport.wait(works)
            self._store(chunk, transport.unpack(data, self._shapes(chunk)))
        self.outbox.close()
        return self.grad_key.to(self.key.dtype), self.grad_value.to(self.value.dtype)


class RingAttention(torch.autograd.Function):
    """(output, lse, output_low) of the local rows over the keys of all ranks in the job's group.

    Every rank of the group has to take part, in the backward too. The low part has no gradient.
    """

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        alibi_slopes: Tensor | None,
        seed: Tensor | None,
        job: Job,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _attend(job, query, key, value, key_mask, alibi_slopes, seed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:6], *output)
        ctx.mark_non_differentiable(output[2])
        ctx.job = inputs[6]
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        job: Job = ctx.job
        query, key, value, key_mask, alibi_slopes, seed, output, lse, output_low = ctx.saved_tensors
        saved = output_low.shape == output.shape
        grad_query = torch.zeros_like(query, dtype=_wide(query.dtype))
        sums, options = _Sums(job, key, value), backward_arguments(job.options)
        for chunk, block in _Circulation(job, key, value, key_mask):
            before = sums.expect(chunk)
            parts = []
            for rows in job.schedule.pairs(job.rank, chunk):
                with transport.timed("computing"):
                    arguments = options | {
                        "grad_output": None if grad_output is None else _slice(grad_output, rows),
                        "grad_lse": None if grad_lse is None else _slice(grad_lse, rows),
                        "query": _slice(query, rows),
                        "key": block.key,
                        "value": block.value,
                        "attn_mask": block.mask,
                        "alibi_slopes": alibi_slopes,
                        "dropout_seed": seed,
                        "output": _slice(output, rows),
                        "lse": _slice(lse, rows),
                        "saved": _slice(output_low, rows) if saved else None,
                        "part": job.part(rows, chunk),
                        "output_mask": QKV_GRADIENTS,
                    }
                    found, *part = _backward(**arguments)
                    _slice(grad_query, rows).add_(found)
                parts.append((part[0], part[1]))
            sums.add(chunk, parts, before)
        grad_key, grad_value = sums.finish()
        return grad_query.to(query.dtype), grad_key, grad_value, None, None, None, None
