"""Find the blocks that hold the beginning of a request's tokens already, and remember those that it fills.

Blocks are found by their digests (block_digests.py), which start from the request's salt, so tenants cannot tell what
others have sent by how fast they are answered. Only full blocks are kept (as in vLLM's automatic prefix caching),
generated tokens' blocks among them: the next turn of a conversation finds the answer of the last one. Of a model with
states a prefix is found as far as it has a snapshot of them (state_snapshots.py), and of one with layers that do not
keep everything as far as the blocks that the next token sees are still there (scheduling/group_pool.py).

Hashing would be the dearest part of scheduling, and most of it for nobody. So a prompt is hashed before it comes here
(requests/job_builder.py), and of the blocks that a request fills in a row only the first; the others stay folded under
its digest, and each is hashed when somebody's tokens have matched the block before it.
"""

from collections.abc import Sequence

from llmc.runtime.engine_stats import SnapshotStats
from llmc.runtime.prefix_cache.block_digests import BlockDigests, root
from llmc.runtime.prefix_cache.chain import Chain
from llmc.runtime.prefix_cache.state_snapshots import StateSnapshots
from llmc.runtime.requests.request import Request
from llmc.runtime.scheduling.block_pool import BlockPool
from llmc.runtime.scheduling.group_pool import GroupPool, usable


class PrefixCache:
    """Blocks of `block_size` tokens by digest, kept in `pool`. queries, hits: tokens looked up and begun behind.

    snapshots: of the states at their ends, of a model that has some. groups: of layers that do not keep everything,
    which have blocks beside those.

    The content of a block in the pool is its digest, or the chain that it is folded in. A folded block has no holder
    but the request that filled it, which lets go of the end first: so the pool takes a chain's blocks from its end.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        snapshots: StateSnapshots | None = None,
        groups: Sequence[GroupPool] = (),
    ) -> None:
        self._pool = pool
        self._groups = groups
        self.snapshots = snapshots
        self._block_size = block_size
        self._digests = BlockDigests(block_size)
        self._blocks: dict[bytes, int] = {}
        self._folded: dict[bytes, list[Chain]] = {}
        self.queries = 0
        self.hits = 0
        pool.tell_losses(self._lose)

    @property
    def snapshot_stats(self) -> SnapshotStats | None:
        """None for a model without states."""
        return None if self.snapshots is None else SnapshotStats(self.snapshots.count, self.snapshots.used)

    def match(self, request: Request) -> list[int]:
        """The longest run of blocks that holds the request's beginning: not yet shared, and never all its tokens.

        At least the last token has to be computed, for its logits; of a request that wants its prompt's logits all are.
        """
        if request.salt is None or request.scored < request.scored_end:
            return []
        found: list[int] = []
        digests = request.prefix.digests
        parent = _root(request)
        for index in range((len(request.tokens) - 1) // self._block_size):
            if index == len(digests):
                digests.append(self._digests.after(parent, request.tokens, index))
            parent = digests[index]
            block = self._blocks.get(parent)
            if block is None:
                break
            found.append(block)
            for chain in self._folded.pop(parent, ()):
                self._hash_first(chain)
        request.prefix.common = len(found)
        return self._usable(request, found)

    def start(self, request: Request, blocks: int) -> None:
        """The request begins, seated, on so many blocks that it has found. The first time it is put into the
        statistics."""
        request.prefix.registered = blocks
        if blocks and self.snapshots is not None:
            self.snapshots.restore(request)
        if request.salt is not None and request.standing.started is None:
            self.queries += len(request.tokens)
            self.hits += blocks * self._block_size

    def leave(self, request: Request) -> None:
        """The request lets go of its blocks. Those without content will never be found."""
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
            chain = own.chain = Chain(request.tokens, begin, digests[begin - 1] if begin else _root(request))
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

    def fork(self, parent: Request, child: Request) -> None:
        """The child starts on the parent's blocks: hash those, because a folded block has one holder."""
        if parent.salt is None:
            return
        self.register(parent)
        chain = parent.prefix.chain
        while chain is not None and chain.blocks:
            self._unfold(chain)
            self._hash_first(chain)
        own = child.prefix
        own.digests = parent.prefix.digests.copy()
        own.common, own.registered = parent.prefix.common, parent.prefix.registered
        if chain is not None:
            own.chain = Chain(child.tokens, chain.begin, chain.parent)

    def _usable(self, request: Request, found: list[int]) -> list[int]:
        """The first of the blocks that were found, to the last one that a request can go on from."""
        known = len(found)
        while True:
            fitting = found[: usable(self._groups, request, found)] if self._groups else found
            if self.snapshots is None:
                return fitting
            found = self.snapshots.usable(request, fitting, known)
            if len(found) == len(fitting):
                return found

    def _lost(self, request: Request) -> list[int]:
        """Those of the request's blocks that nobody will find."""
        return [block for block in request.standing.blocks if self._pool.content(block) is None]

    def _hash_first(self, chain: Chain, digest: bytes | None = None) -> None:
        """The chain's first block can be found from now on; the others are folded under it. digest: if known."""
        block = chain.blocks.pop(0)
        if digest is None:
            digest = self._digests.after(chain.parent, chain.tokens, chain.begin)
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

    def _unfold(self, chain: Chain) -> None:
        siblings = self._folded[chain.parent]
        siblings.remove(chain)
        if not siblings:
            del self._folded[chain.parent]

    def _lose(self, blocks: Sequence[int], contents: Sequence[object]) -> None:
        """The pool needs the blocks for something else. A request lets go of its chain at once: they come in runs."""
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


def hash_prompt(request: Request, digests: BlockDigests) -> None:
    """Before the request is added, because it takes microseconds a block, and a step waits for what the scheduler
    does."""
    if request.salt is not None:
        request.prefix.digests = digests.of_prompt(request.tokens, request.salt)


def _root(request: Request) -> bytes:
    assert request.salt is not None
    return root(request.salt)
