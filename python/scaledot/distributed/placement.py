"""Which positions of a sequence each rank holds; cutting a tensor that way, and putting it together again.

contiguous   rank r holds one run of positions, the r-th of n
zigzag       the sequence is cut into 2n chunks; rank r holds chunk r and chunk 2n - 1 - r ("head-tail"). Under a causal
             mask later rows have more keys, and this gives all ranks the same amount of work (ring-flash-attention;
             Llama 3, Grattafiori et al. 2024, section 3.3.2). Striped placement (Brandon et al. 2023) does the same
             position by position. It is not offered: its shards are not runs of positions, and kernels skip keys by
             runs.

Lengths need not divide: of m parts of L positions, the first L % m have one position more.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._checks import check_device, described, integer, one_of, require_tensors
from .._keywords import check_keywords
from . import checks

__all__ = ["Placement", "positions", "shard", "unshard"]

Placement = Literal["contiguous", "zigzag"]


class Run(NamedTuple):
    """Positions [begin, end) of a sequence."""

    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin


def cut(run: Run, parts: int) -> list[Run]:
    """`run` in `parts` runs; if it does not divide, the first ones are a position longer."""
    size, longer = divmod(run.length, parts)
    ends = [run.begin + (k + 1) * size + min(k + 1, longer) for k in range(parts)]
    return [Run(begin, end) for begin, end in zip([run.begin, *ends[:-1]], ends, strict=True)]


def runs_of_ranks(length: int, ranks: int, placement: str) -> list[list[Run]]:
    """The runs of `length` positions that each of `ranks` holds, in its order. Runs may be empty."""
    check_placement(placement)
    whole = Run(0, length)
    if placement == "contiguous":
        return [[run] for run in cut(whole, ranks)]
    chunks = cut(whole, 2 * ranks)
    return [[chunks[rank], chunks[2 * ranks - 1 - rank]] for rank in range(ranks)]


def split_runs(runs: list[Run], parts: int) -> list[list[Run]]:
    """The positions of `runs`, in their order, cut into one contiguous part for each of `parts` ranks."""
    result = []
    for place in cut(Run(0, sum(run.length for run in runs)), parts):
        held, passed = [], 0
        for run in runs:
            begin = max(place.begin - passed, 0)
            end = min(place.end - passed, run.length)
            if begin < end:
                held.append(Run(run.begin + begin, run.begin + end))
            passed += run.length
        result.append(held)
    return result


def check_placement(placement: object) -> None:
    one_of("placement", placement, "contiguous", "zigzag")


def check_mesh(mesh: object) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: got {described(mesh)}; needs a torch.distributed DeviceMesh")


def _dimension(tensor: Tensor, dim: int) -> int:
    """`dim` of the tensor, counted from its first dimension."""
    require_tensors(tensor=tensor)
    found: int = integer("dim", dim)
    if not -tensor.dim() <= found < tensor.dim():
        raise ValueError(f"dim: got {found}; needs a dimension of a tensor of shape {tuple(tensor.shape)}")
    return found % tensor.dim()


def layout(length: int, mesh: DeviceMesh, placement: str) -> list[list[Run]]:
    """The rows that each rank of the mesh holds, ranks in the mesh's order.

    The first dimension of a 2-D mesh places the sequence by `placement`; the second cuts each part once more.
    """
    check_mesh(mesh)
    if mesh.ndim not in (1, 2):
        raise ValueError(f"mesh: got {mesh.ndim} dimensions; needs 1 or 2, those over which the sequence is sharded")
    outer = runs_of_ranks(length, mesh.size(0), placement)
    return outer if mesh.ndim == 1 else [held for runs in outer for held in split_runs(runs, mesh.size(1))]


def number_in(mesh: DeviceMesh) -> int:
    """This rank's number in the mesh, in the order of `layout`."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("mesh: this rank is not in it")
    number = 0
    for size, k in zip(mesh.shape, coordinate, strict=True):
        number = number * size + k
    return number


@check_keywords
def positions(
    length: int, mesh: DeviceMesh, placement: Placement = "zigzag", device: torch.device | None = None
) -> Tensor:
    """The positions of the whole sequence that this rank holds, in its order.

    Position embeddings and rotary embeddings of a shard need them.

    Args:
        length: of the whole sequence.
        mesh, placement: as for :func:`shard`.
        device: of the result; default the CPU.

    Returns:
        (local length,) int64.
    """
    check_device("device", device)
    length = integer("length", length, least=0)
    runs = layout(length, mesh, placement)[number_in(mesh)]
    pieces = [torch.arange(run.begin, run.end, device=device) for run in runs]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=device)


@check_keywords
def shard(tensor: Tensor, mesh: DeviceMesh, dim: int, placement: Placement = "zigzag") -> Tensor:
    """This rank's part of a tensor that every rank has whole. Nothing is sent.

    Args:
        tensor: any shape; `dim` is its sequence dimension, of any length (even 0, or less than the number of ranks).
        mesh: 1-D, or 2-D as :func:`context_parallel_attention` takes it.
        placement: "zigzag" or "contiguous", over the ranks of a 1-D mesh or of the first dimension of a 2-D mesh. The
            second dimension of a mesh cuts each part into contiguous ones.

    Returns:
        The part, a copy; differentiable.

    Raises:
        ValueError: a mesh without this rank or of more than two dimensions; another `placement`; no dimension `dim`.
        TypeError: an argument has the wrong type.
    """
    dim = _dimension(tensor, dim)
    runs = layout(tensor.shape[dim], mesh, placement)[number_in(mesh)]
    pieces = [tensor.narrow(dim, run.begin, run.length) for run in runs]
    return torch.cat(pieces, dim) if pieces else tensor.narrow(dim, 0, 0).clone()


@check_keywords
def unshard(tensor: Tensor, mesh: DeviceMesh, dim: int, placement: Placement = "zigzag") -> Tensor:
    """The whole tensor on every rank, from the parts that :func:`shard` gave. All ranks of the mesh have to call it.

    It is not differentiable: if all ranks computed one loss from the whole tensor, it would count once for each rank.
    Compute the loss of the local part, and sum it over the ranks.

    Args:
        tensor: this rank's part.
        mesh, dim, placement: as they were passed to :func:`shard`.

    Returns:
        The whole tensor, a copy.

    Raises:
        ValueError: on every rank, if the tensor requires grad (pass ``tensor.detach()``), if the parts are not those of
            this placement, or if ranks differ in shape, dtype, `dim` or `placement`.
        TypeError: an argument has the wrong type. The other ranks get a RuntimeError, except for a wrong `mesh`.
    """
    check_mesh(mesh)
    groups = [mesh.get_group(k) for k in reversed(range(mesh.ndim))]
    refusal: Exception | None = None
    facts: dict[str, object] = {}
    local = torch.empty(0, device=mesh.device_type)  # of a rank that refuses its arguments
    try:
        dim = _dimension(tensor, dim)
        check_placement(placement)
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError("tensor: got one that requires grad; unshard has no gradient, pass tensor.detach()")
        local = tensor.detach().movedim(dim, 0).contiguous()
        facts = {"tensor": (tuple(local.shape[1:]), local.dtype), "dim": dim, "placement": placement}
    except (TypeError, ValueError) as error:
        refusal = error
    numbers = checks.agree("unshard", facts, refusal, [local.shape[0]], groups, local.device)
    lengths = [int(n) for n in numbers.flatten()]
    held = layout(sum(lengths), mesh, placement)
    for number, (runs, found) in enumerate(zip(held, lengths, strict=True)):
        wanted = sum(run.length for run in runs)
        if wanted != found:
            raise ValueError(
                f"tensor: rank {number} of the mesh holds {found} positions; placement {placement!r} of "
                f"{sum(lengths)} gives it {wanted}"
            )
    longest = max(lengths)
    padded = local.new_zeros(longest, *local.shape[1:])
    padded[: local.shape[0]] = local
    parts = [padded]
    for group in groups:
        gathered = [[torch.empty_like(part) for _ in range(dist.get_world_size(group))] for part in parts]
        for part, row in zip(parts, gathered, strict=True):
            dist.all_gather(row, part, group=group)
        parts = [part for rank in range(dist.get_world_size(group)) for part in (row[rank] for row in gathered)]
    whole = local.new_empty(sum(lengths), *local.shape[1:])
    for part, runs in zip(parts, held, strict=True):
        at = 0
        for run in runs:
            whole[run.begin : run.end] = part[at : at + run.length]
            at += run.length
    return whole.movedim(0, dim)
