"""The steady loop of a kernel: the path that a warp takes from one tile to the next if nothing is masked.

A kernel's code is a graph of basic blocks. Of the loops that contain tensor core instructions (HGMMA) and no smaller
such loop, the steady one has the most of them. The path through it is the one with the most HGMMA, and then with the
fewest instructions: masks, slow divisions and repeated waits are branches that it does not take. Of two loops with
equally many HGMMA, the one with the shorter path is steady.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .disassembly import Instruction

Value = tuple[int, int]  # of a block: its HGMMA, and its instructions, negative
_MANY = 1000  # an HGMMA counts more than all stores of a kernel
Graph = dict[int, list[int]]  # the first instruction of each block: those of the blocks that may follow

_ENDS = {"BRA", "BSYNC", "EXIT", "RET", "CALL", "BRX", "WARPSYNC"}
_CONDITIONAL_BRANCH = re.compile(r"^BRA\S*\s+!?U?P\d")


class NoLoopError(ValueError):
    """A kernel without a loop over tiles."""


def is_conditional(branch: Instruction) -> bool:
    """Whether a branch may be passed by."""
    return branch.guarded or "DIV" in branch.opcode or _CONDITIONAL_BRANCH.match(branch.text) is not None


def _targets(code: Sequence[Instruction], index: dict[int, int]) -> dict[int, int]:
    """For each branch the index of the instruction that it jumps to. BSYNC goes where the last BSSY of its register
    says."""
    targets: dict[int, int] = {}
    joins: dict[str, int] = {}
    for k, instruction in enumerate(code):
        if instruction.name == "BSSY" and instruction.target is not None:
            joins[instruction.text.split()[-2].strip(",")] = instruction.target
        to = instruction.target if instruction.name == "BRA" else None
        if instruction.name == "BSYNC":
            to = joins.get(instruction.text.split()[-1])
        if to is not None and to in index:
            targets[k] = index[to]
    return targets


def blocks_of(code: Sequence[Instruction]) -> tuple[Graph, dict[int, int]]:
    """The blocks that follow each block, and where each block ends."""
    index = {instruction.address: k for k, instruction in enumerate(code)}
    targets = _targets(code, index)
    leaders = {0, *targets.values()}
    leaders.update(k + 1 for k, instruction in enumerate(code) if instruction.name in _ENDS)
    first = sorted(k for k in leaders if k < len(code))
    ends = dict(zip(first, [*first[1:], len(code)], strict=True))
    graph: Graph = {}
    for begin, end in ends.items():
        last = code[end - 1]
        follow = [targets[end - 1]] if end - 1 in targets else []
        leaves = last.name in {"EXIT", "RET"} or (end - 1 in targets and last.name in {"BRA", "BSYNC"})
        if end < len(code) and (not leaves or is_conditional(last)):
            follow.append(end)
        graph[begin] = follow
    return graph, ends


def _back_edges(graph: Graph) -> list[tuple[int, int]]:
    """The edges that lead back to a block on the way to them, by a search in depth."""
    found: list[tuple[int, int]] = []
    seen: set[int] = set()
    for root in graph:
        if root in seen:
            continue
        seen.add(root)
        active = {root}
        stack = [(root, iter(graph[root]))]
        while stack:
            node, rest = stack[-1]
            following = next(rest, None)
            if following is None:
                stack.pop()
                active.discard(node)
            elif following in active:
                found.append((node, following))
            elif following not in seen:
                seen.add(following)
                active.add(following)
                stack.append((following, iter(graph[following])))
    return found


def _body(graph: Graph, latch: int, head: int) -> set[int]:
    """The blocks of a loop: those from which the latch is reached without the head."""
    before: dict[int, list[int]] = {}
    for node, follow in graph.items():
        for following in follow:
            before.setdefault(following, []).append(node)
    body, stack = {head}, [latch]
    while stack:
        node = stack.pop()
        if node not in body:
            body.add(node)
            stack.extend(before.get(node, []))
    return body


class _Flow:
    """A kernel's blocks, their HGMMA, and its loops: the blocks of each, by the first one."""

    def __init__(self, code: Sequence[Instruction]) -> None:
        self.code = code
        self.graph, self.ends = blocks_of(code)
        self.products = {begin: sum(x.name == "HGMMA" for x in code[begin:end]) for begin, end in self.ends.items()}
        self.back = _back_edges(self.graph)
        self.loops: dict[int, set[int]] = {}
        for latch, head in self.back:
            self.loops.setdefault(head, set()).update(_body(self.graph, latch, head))

    def path(self, head: int, body: set[int], latches: set[int], stores: bool = False) -> list[Instruction]:
        """From `head` through blocks of `body` to one of `latches`, with the most HGMMA, then, if `stores`, the most
        stores of 16 bytes, then the fewest instructions. Each loop is passed once."""
        rounds = set(self.back)
        once = {node: [n for n in self.graph[node] if n in body and (node, n) not in rounds] for node in body}
        values = {
            node: (_MANY * self.products[node] + stores * self._stores(node), node - self.ends[node]) for node in body
        }
        blocks = _best_path(once, head, latches, values)
        return [instruction for begin in blocks for instruction in self.code[begin : self.ends[begin]]]

    def _stores(self, begin: int) -> int:
        return sum(x.name == "STG" and ".128" in x.opcode for x in self.code[begin : self.ends[begin]])

    def round(self, head: int, stores: bool = False) -> list[Instruction]:
        """One round of a loop."""
        return self.path(head, self.loops[head], {latch for latch, to in self.back if to == head}, stores)

    def steady(self) -> list[Instruction]:
        loops = {head: body for head, body in self.loops.items() if any(self.products[node] for node in body)}
        inner = [
            head
            for head, body in loops.items()
            if not any(other != head and other in body and loops[other] < body for other in loops)
        ]
        if not inner:
            raise NoLoopError("no loop has an HGMMA instruction")
        most = max(sum(self.products[node] for node in loops[head]) for head in inner)
        return min((self.round(h) for h in inner if sum(self.products[node] for node in loops[h]) == most), key=len)


def steady_path(code: Sequence[Instruction]) -> list[Instruction]:
    """The instructions of one round of the steady loop, in order. Raises NoLoopError."""
    return _Flow(code).steady()


def outside_path(code: Sequence[Instruction], stores: bool) -> list[Instruction]:
    """What a consumer's warp executes once a tile, beside the steady loop: one round of the loop around it or, without
    such a loop, the way through the kernel. Other loops on it are passed once. `stores`: with results that leave
    registers as 16 bytes: the low part of an output, dK and dV."""
    flow = _Flow(code)
    steady = {instruction.address for instruction in flow.steady()}
    index = {instruction.address: k for k, instruction in enumerate(code)}
    head = index[min(steady)]
    around = [h for h, body in flow.loops.items() if h != head and head in body]
    if around:
        path = flow.round(min(around, key=lambda h: len(flow.loops[h])), stores)
    else:
        leaves = {begin for begin, end in flow.ends.items() if code[end - 1].name == "EXIT"}
        path = flow.path(0, set(flow.graph), leaves, stores)
    return [instruction for instruction in path if instruction.address not in steady]


def _best_path(graph: Graph, head: int, latches: set[int], values: Mapping[int, Value]) -> list[int]:
    """The blocks from `head` to one of `latches` with the largest sum of values, compared element by element. The graph
    has no rounds."""
    best: dict[int, tuple[Value, list[int]] | None] = {}
    stack = [(head, False)]
    while stack:
        node, ready = stack.pop()
        if node in best:
            continue
        follow = graph[node]
        if not ready:
            stack.append((node, True))
            stack.extend((n, False) for n in follow if n not in best)
            continue
        reached = [found for n in follow if (found := best.get(n)) is not None]
        if node in latches:
            reached.append(((0, 0), []))
        if reached:
            (most, fewest), path = max(reached, key=lambda found: found[0])
            here = values[node]
            best[node] = ((most + here[0], fewest + here[1]), [node, *path])
        else:
            best[node] = None
    found = best[head]
    if found is None:
        raise NoLoopError("the loop has no way through")
    return found[1]
