"""Find the blocks that hold the beginning of a request's tokens already, and remember those that it fills.

Blocks are found by their digests (block_digests.py), which start from the request's salt, so that tenants cannot infer
the prompts of others from response times. Only full blocks are kept (as in vLLM's automatic prefix caching), generated
tokens' blocks among them: the next turn of a conversation finds the answer of the last one. For a model with states, a
prefix is found up to a snapshot (state_snapshots.py). With layers that do not keep everything, it is found as far as
the blocks that the next token sees still exist (scheduling/group_pool.py), and blocks after rows that have left have
other digests than those of the plain prefix (cut_marks.py).

Hashing would be the most expensive part of scheduling, and mostly unused. A prompt is therefore hashed before it comes
here (requests/job_builder.py), and only the first of the consecutive blocks that a request fills. The others are stored
under its digest, and each is hashed when a request's tokens have matched the block before it.
"""

from collections.abc import Sequence
from functools import partial

from llmc.runtime.engine_stats import SnapshotStats
from llmc.runtime.kv_tier.block_offload import BlockOffload
from llmc.runtime.prefix_cache.block_digests import BlockDigests, root
from llmc.runtime.prefix_cache.chain import Chain
from llmc.runtime.prefix_cache.cut_marks import CutMarks
from llmc.runtime.prefix_cache.state_snapshots import StateSnapshots
from llmc.runtime.requests.request import Request
from llmc.runtime.scheduling.block_pool import BlockPool
from llmc.runtime.scheduling.group_pool import GroupPool, usable


class PrefixCache:
    """Blocks of `block_size` tokens by digest, kept in `pool`. queries, hits: tokens looked up, and found.

    snapshots: the snapshots of the states at their ends; None for a model without states. groups: pools of layers that
    do not keep everything, which have their own blocks. offload: takes the blocks that the pools give away; none are
    folded then.

    The content of a block in the pool is its digest, or the chain that it is folded in. A folded block has no holder
    but the request that filled it, which releases the end first. So the pool takes a chain's blocks from its end.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        snapshots: StateSnapshots | None = None,
        groups: Sequence[GroupPool] = (),
        offload: BlockOffload | None = None,
    ) -> None:
        self._pool = pool
        self._offload = offload
        self._groups = groups
        self.snapshots = snapshots
        self._block_size = block_size
        self._digests = BlockDigests(block_size, [group.built for group in groups])
        self._blocks: dict[bytes, int] = {}
        self._folded: dict[bytes, list[Chain]] = {}
        self.queries = 0
        self.hits = 0
        pool.tell_losses(self._lose)
        if offload is not None:
            for number, group in enumerate(groups, 1):
                group.tell_losses(partial(self._offload_group, offload, number))

    @property
    def snapshot_stats(self) -> SnapshotStats | None:
        """The numbers of snapshots; None for a model without states."""
        return None if self.snapshots is None else SnapshotStats(self.snapshots.count, self.snapshots.used)

    def match(self, request: Request) -> list[int]:
        """The longest run of blocks that holds the request's beginning: not yet shared, and never all its tokens.

        At least the last token has to be computed, for its logits; for a request that needs its prompt's logits, all
        tokens are computed.
        """
        return self._usable(request, self.run(request))

    def run(self, request: Request) -> list[int]:
        """The longest run of blocks that holds the request's beginning, of use or not."""
        if request.salt is None or request.scored < request.scored_end:
            return []
        blocks: list[int] = []
        digests, marks = request.prefix.digests, self._marks(request)
        parent = _root(request)
        for index in range((len(request.tokens) - 1) // self._block_size):
            if index == len(digests):
                digests.append(self._digests.after(parent, request.tokens, index, marks))
            parent = digests[index]
            block = self._blocks.get(parent)
            if block is None:
                break
            blocks.append(block)
            for chain in self._folded.pop(parent, ()):
                self._hash_first(chain)
        request.prefix.common = len(blocks)
        return blocks

    def digest(self, request: Request, index: int) -> bytes:
        """The digest of the index-th block of a request with a salt."""
        digests = request.prefix.digests
        while len(digests) <= index:
            parent = digests[-1] if digests else _root(request)
            digests.append(self._digests.after(parent, request.tokens, len(digests), self._marks(request)))
        return digests[index]

    def find(self, digest: bytes) -> int | None:
        """The block of this digest; None if there is none."""
        return self._blocks.get(digest)

    def admit(self, block: int, digest: bytes) -> None:
        """Make a held block that was read from the second tier findable from now on."""
        self._blocks[digest] = block
        self._pool.keep((block,), digest)

    def offload_all(self, offload: BlockOffload) -> None:
        """Save the newest blocks of the cache to the second tier, until it is full."""
        newest = [*self._blocks.items()][-offload.tier.place_blocks :]
        for digest, block in reversed(newest):
            self._offload_blocks(offload, (block,), (digest,))
            offload.tier.settle()

    def start(self, request: Request, blocks: int) -> None:
        """Start a seated request on `blocks` found blocks. Its first start is counted in the statistics."""
        request.prefix.registered = blocks
        if blocks and self.snapshots is not None:
            self.snapshots.restore(request)
        if request.salt is not None and request.standing.started is None:
            self.queries += len(request.tokens)
            self.hits += blocks * self._block_size

    def leave(self, request: Request) -> None:
        """Release the blocks of a request. Blocks without content will not be found again."""
        own = request.prefix
        if self.snapshots is not None:
            self.snapshots.leave(request, self._lost(request))
        if self._groups:
            lost = self._lost(request)
            for group in self._groups:
                group.drop(lost)
        own.registered, own.chain = 0, None

    def register(self, request: Request) -> None:
        """Remember the blocks that the request has filled. Call it only once logits after them were finite."""
        own = request.prefix
        full = request.computed // self._block_size
        if request.salt is None or full <= own.registered:
            return
        chain, known = own.chain, None
        if chain is None:
            begin, digests = own.registered, own.digests
            parent = digests[begin - 1] if begin else _root(request)
            chain = own.chain = Chain(request.tokens, begin, parent, self._marks(request))
            # `match` has looked for the first of them in vain.
            known = digests[begin] if len(digests) > begin else None
        added = request.standing.blocks[own.registered : full]
        for group, table in zip(self._groups, request.standing.groups, strict=True):
            group.keep(request, table, own.registered, full)
        own.registered = full
        self._pool.keep(added, chain)
        is_folded = bool(chain.blocks)
        chain.blocks += added
        if not is_folded:
            self._hash_first(chain, known)
        if self._offload is not None:
            self._hash_all(chain)

    def fork(self, parent: Request, child: Request) -> None:
        """The child starts on the parent's blocks: hash those, because a folded block has one holder."""
        if parent.salt is None:
            return
        self.register(parent)
        chain = parent.prefix.chain
        if chain is not None:
            self._hash_all(chain)
        own = child.prefix
        own.digests = parent.prefix.digests.copy()
        own.common, own.registered = parent.prefix.common, parent.prefix.registered
        if chain is not None:
            own.chain = Chain(child.tokens, chain.begin, chain.parent, self._marks(child))

    def _usable(self, request: Request, found_blocks: list[int]) -> list[int]:
        """The first of the blocks that were found, to the last one that a request can continue from."""
        known = len(found_blocks)
        while True:
            fitting = found_blocks[: usable(self._groups, request, found_blocks)] if self._groups else found_blocks
            if self.snapshots is None:
                return fitting
            found_blocks = self.snapshots.usable(request, fitting, known)
            if len(found_blocks) == len(fitting):
                return found_blocks

    def _marks(self, request: Request) -> CutMarks:
        own = request.prefix
        if own.marks is None:
            own.marks = self._digests.marks(request.origin.policy, request.prompt_length)
        return own.marks

    def _lost(self, request: Request) -> list[int]:
        """The request's blocks that no other request will find."""
        return [block for block in request.standing.blocks if self._pool.content(block) is None]

    def _hash_first(self, chain: Chain, digest: bytes | None = None) -> None:
        """The chain's first block can be found from now on; the others are folded under it. digest: if known."""
        block = chain.blocks.pop(0)
        if digest is None:
            digest = self._digests.after(chain.parent, chain.tokens, chain.begin, chain.marks)
        chain.begin += 1
        chain.parent = digest
        if digest in self._blocks:
            if self.snapshots is not None:
                self.snapshots.move(block, self._blocks[digest])
            for group in self._groups:
                group.move(block, self._blocks[digest])
            self._pool.forget(block)
        else:
            self._blocks[digest] = block
            self._pool.rename(block, digest)
        if chain.blocks:
            self._folded.setdefault(digest, []).append(chain)

    def _hash_all(self, chain: Chain) -> None:
        """Make all blocks of the chain findable from now on."""
        while chain.blocks:
            self._unfold(chain)
            self._hash_first(chain)

    def _unfold(self, chain: Chain) -> None:
        siblings = self._folded[chain.parent]
        siblings.remove(chain)
        if not siblings:
            del self._folded[chain.parent]

    def _lose(self, blocks: Sequence[int], contents: Sequence[object]) -> None:
        """The pool needs the blocks for something else. A request releases its chain at once, so blocks come in
        runs."""
        if self._offload is not None:
            self._offload_blocks(self._offload, blocks, contents)
        if self.snapshots is not None:
            self.snapshots.drop(blocks)
        for group in self._groups:
            group.drop(blocks)
        begin, count = 0, len(blocks)
        while begin < count:
            content = contents[begin]
            end = begin + 1
            if isinstance(content, Chain):
                while end < count and contents[end] is content:
                    end += 1
                kept = len(content.blocks) - (end - begin)
                assert content.blocks[kept] == blocks[end - 1], "a chain is lost from its end"
                del content.blocks[kept:]
                if not kept:
                    self._unfold(content)
            else:
                assert isinstance(content, bytes)
                del self._blocks[content]
            begin = end

    def _offload_blocks(self, offload: BlockOffload, blocks: Sequence[int], digests: Sequence[object]) -> None:
        """Blocks of the first group that will not be found any more, and what goes with them in the others."""
        offload.keep(0, blocks, digests)
        for number, group in enumerate(self._groups, 1):
            pairs = zip(blocks, digests, strict=True)
            kept = {own: digest for block, digest in pairs if (own := group.kept(block)) is not None}
            offload.keep(number, [*kept], [*kept.values()])

    def _offload_group(self, offload: BlockOffload, number: int, blocks: Sequence[int], firsts: Sequence[int]) -> None:
        """Blocks of another group, which are evicted on their own. firsts: the blocks of the first group with the same
        tokens."""
        offload.keep(number, blocks, [self._pool.content(first) for first in firsts])


def hash_prompt(request: Request, digests: BlockDigests) -> None:
    """Hash a prompt before its request is added, because hashing takes microseconds per block, and a step waits for the
    scheduler."""
    if request.salt is not None:
        own = request.prefix
        own.marks = digests.marks(request.origin.policy, request.prompt_length)
        own.digests = digests.of_prompt(request.tokens, request.salt, own.marks)


def _root(request: Request) -> bytes:
    assert request.salt is not None
    return root(request.salt)
