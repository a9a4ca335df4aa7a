"""Snapshots of a sequence's states at the ends of some blocks, from which a found prefix can be continued.

Keys and values of a prefix do not bring a model with states to its end: the states there do. They are as large after
sixteen tokens as after thousands, so few ends of blocks have them, and a prefix counts as far as the last that has:

- the last one in a prompt that leaves a token to compute: a request with the same prompt starts there;
- where a prompt diverges from earlier ones (Marconi, Pan et al. 2024): the next prompt that diverges there finds it;
- the latest in an answer, in the place of the one before: the next turn of the conversation begins there.

Chunks of a prompt end where a snapshot is taken, which is a step more. That, and the copy, are worth it only where a
later request saves `spacing` tokens or more.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from llmc.runtime.requests.request import Request

# The rest of a prompt after its snapshot is a separate step, which reads all weights once more.
SPACING = 64


class StateSnapshots:
    """Slots of states, numbered as those of seats are, for snapshots at the ends of blocks.

    copy_states: from slot to slot, at once. When no slot is left the snapshot that was taken or read longest ago goes.
    A block that is given away, or was never registered, takes its snapshot with it: PrefixCache tells.
    """

    def __init__(
        self, slots: range, copy_states: Callable[[int, int], None], block_size: int, spacing: int = SPACING
    ) -> None:
        self.count = len(slots)
        self._free = list(reversed(slots))
        self._copy_states = copy_states
        self._block_size = block_size
        self._spacing = spacing
        # Slot by block, the one used last at the end.
        self._slots: OrderedDict[int, int] = OrderedDict()

    @property
    def used(self) -> int:
        """The number of snapshots."""
        return len(self._slots)

    def usable(self, request: Request, found_blocks: Sequence[int], computed: int) -> list[int]:
        """The found blocks up to the last one with a snapshot; also plans where to take further snapshots. computed:
        number of blocks that were computed before, not all of which may be usable."""
        end = len(found_blocks)
        while end and found_blocks[end - 1] not in self._slots:
            end -= 1
        known, last = request.states, end * self._block_size
        known.kept, known.stops = last, []
        for blocks in (computed, (len(request.tokens) - 1) // self._block_size):
            position = blocks * self._block_size
            if self.count and position - last >= self._spacing:
                known.stops.append(position)
                last = position
        return list(found_blocks[:end])

    def restore(self, request: Request) -> None:
        """Restore the states of the request's seat as of the end of its last block. All of its blocks must have been
        found."""
        own = request.standing
        assert own.seat is not None
        block = own.blocks[own.computed // self._block_size - 1]
        self._slots.move_to_end(block)
        self._copy_states(self._slots[block], own.seat)

    def fork(self, parent: Request, child: Request) -> None:
        """Copy the states of the parent's seat to the child's."""
        first, own = parent.standing.seat, child.standing.seat
        assert first is not None and own is not None
        self._copy_states(first, own)
        child.states.kept = parent.states.kept

    def reach(self, request: Request) -> None:
        """Take the snapshot that was planned at the end of a chunk, if one was."""
        stops = request.states.stops
        if stops and stops[0] == request.computed:
            del stops[0]
            self._take(request)

    def pass_ends(self, requests: Iterable[Request]) -> None:
        """Decoding requests are at the end of a block: take their snapshots, in the place of those before."""
        for request in requests if self.count else ():
            known = request.states
            if request.salt is not None and request.computed - known.kept >= self._spacing:
                if known.latest is not None:
                    self.drop((known.latest,))
                known.latest = self._take(request)

    def leave(self, request: Request, lost: Iterable[int]) -> None:
        """Release a request's blocks; those of `lost` will not be found again."""
        self.drop(lost)
        known = request.states
        known.stops, known.kept, known.latest = [], 0, None

    def move(self, block: int, other: int) -> None:
        """The two hold the same tokens, and only the other one will be found."""
        slot = self._slots.pop(block, None)
        if slot is not None and self._slots.setdefault(other, slot) != slot:
            self._free.append(slot)

    def drop(self, blocks: Iterable[int]) -> None:
        """The blocks will not be found, or hold something else soon."""
        for block in blocks:
            slot = self._slots.pop(block, None)
            if slot is not None:
                self._free.append(slot)

    def _take(self, request: Request) -> int:
        """Take a snapshot of the states at the end of the request's computed tokens, which is the end of a block;
        returns that block."""
        own, position = request.standing, request.computed
        assert own.seat is not None and not position % self._block_size
        block = own.blocks[position // self._block_size - 1]
        self.drop((block,))
        slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
        self._copy_states(own.seat, slot)
        self._slots[block] = slot
        request.states.kept = position
        return block
