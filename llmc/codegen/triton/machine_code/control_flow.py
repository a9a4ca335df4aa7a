"""Basic blocks, loops and dominators of a kernel's machine code."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import networkx as nx

from llmc.codegen.triton.machine_code.disassembly import Instruction

_TARGET = re.compile(r"0x([0-9a-f]+)$")
# The instructions that leave a block. Calls of slow paths of arithmetic return to the next instruction, as does BSYNC.
_JUMPS = ("BRA", "BRX", "EXIT", "RET")
# A jump to one of several places, which the disassembler does not tell: warps of a block that do different work.
_INDEXED_JUMP = "BRX"
# Memory accesses, matrix instructions and floating-point arithmetic.
_WORK = re.compile(r"(LD|ST)(G|S|L)|UTMA|UBLKCP|UTC\w*MMA|\w?[HIQO]G?MMA|[FHD](ADD|MUL|FMA)|RED|ATOM|MUFU")


@dataclass(frozen=True)
class Loop:
    """A natural loop. instructions: the instructions of all its blocks, in the order of their addresses. blocks: their
    addresses."""

    instructions: tuple[Instruction, ...]
    blocks: frozenset[int]


@dataclass(frozen=True)
class ControlFlow:
    """The basic blocks of a kernel by the address of their first instruction, and the graph of jumps among them."""

    blocks: dict[int, tuple[Instruction, ...]]
    graph: "nx.DiGraph[int]"

    def innermost_loops(self) -> list[Loop]:
        """Loops without another loop inside that take more than one instruction."""
        bodies: dict[int, set[int]] = {}
        for source, header in self.graph.edges:
            if header in self._dominators.get(source, ()):
                bodies.setdefault(header, {header}).update(self._body(source, header))
        working = {header: body for header, body in bodies.items() if self._is_work(body)}
        return [
            Loop(tuple(instruction for block in sorted(body) for instruction in self.blocks[block]), frozenset(body))
            for header, body in working.items()
            if not any(other != header and other in body for other in working)
        ]

    def dominating(self, instruction: Instruction, of: Instruction) -> bool:
        """Whether every path to `of` goes through `instruction`."""
        first, last = self._block_of(instruction), self._block_of(of)
        if first == last:
            return instruction.address <= of.address
        return first in self._dominators.get(last, ())

    def _is_work(self, body: set[int]) -> bool:
        """Whether it does more than wait at a barrier, or jump to itself as the end of a function does."""
        return any(_WORK.match(instruction.name) for block in body for instruction in self.blocks[block])

    def _body(self, source: int, header: int) -> set[int]:
        body, pending = {header}, [source]
        while pending:
            block = pending.pop()
            if block not in body:
                body.add(block)
                pending.extend(self.graph.predecessors(block))
        return body

    @cached_property
    def _dominators(self) -> dict[int, set[int]]:
        """Blocks that every path to a block goes through, itself included; only of blocks that are reached."""
        parents = nx.immediate_dominators(self.graph, 0)
        dominators: dict[int, set[int]] = {}
        for block in parents:
            chain, ancestor = {block}, block
            while ancestor != 0:
                ancestor = parents[ancestor]
                chain.add(ancestor)
            dominators[block] = chain
        return dominators

    def _block_of(self, instruction: Instruction) -> int:
        return max(start for start in self.blocks if start <= instruction.address)


def control_flow(instructions: Sequence[Instruction]) -> ControlFlow:
    """The control flow of a kernel, from its jumps."""
    starts = {0}
    for instruction, following in pairwise(instructions):
        if instruction.name in _JUMPS:
            starts.add(following.address)
    starts |= {target for jump in instructions if (target := _target(jump)) is not None}
    blocks: dict[int, list[Instruction]] = {}
    for instruction in instructions:
        if instruction.address in starts:
            blocks[instruction.address] = []
        blocks[max(blocks)].append(instruction)
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(blocks)
    ordered = sorted(blocks)
    for start, behind in zip(ordered, [*ordered[1:], None], strict=True):
        last = blocks[start][-1]
        target = _target(last)
        if target is not None:
            graph.add_edge(start, target)
        goes_on = last.name not in _JUMPS or last.predicate is not None or _is_conditional(last)
        if goes_on and behind is not None:
            graph.add_edge(start, behind)
    for start in ordered:
        if blocks[start][-1].name == _INDEXED_JUMP:
            _add_targets(graph, start)
    return ControlFlow({start: tuple(members) for start, members in blocks.items()}, graph)


def _add_targets(graph: "nx.DiGraph[int]", source: int) -> None:
    """Let an indexed jump go to all code that nothing else leads to."""
    reached = {0, *nx.descendants(graph, 0)}
    for block in sorted(graph.nodes):
        if block not in reached:
            graph.add_edge(source, block)
            reached |= {block, *nx.descendants(graph, block)}


def _target(instruction: Instruction) -> int | None:
    if instruction.name != "BRA":
        return None
    match = _TARGET.search(instruction.operands)
    return None if match is None else int(match[1], 16)


def _is_conditional(instruction: Instruction) -> bool:
    """Whether a jump has its condition among the operands, as `BRA.U UP0, 0x40` and `BRA P1, 0x40` have."""
    return instruction.name == "BRA" and "," in instruction.operands
