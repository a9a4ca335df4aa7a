"""Find the blocks that hold the beginning of a request's tokens already, and remember those that it fills.

A block's digest is SHA-256 over the digest of the block before it and its own tokens, so it stands for the whole
prefix; the chain starts from the request's salt, so tenants cannot tell what others have sent by how fast they are
answered. Only full blocks are kept (as in vLLM's automatic prefix caching), generated tokens' blocks among them: the
next turn of a conversation finds the answer of the last one.
"""

from __future__ import annotations

from hashlib import sha256
from struct import Struct

from llmc.runtime.block_pool import BlockPool
from llmc.runtime.request import Request

_ROOT = b"llmc prefix"


def tenant_salt(tenant: str | None) -> bytes:
    """What a tenant's chains start from; requests without a tenant share one."""
    return b"" if tenant is None else sha256(tenant.encode()).digest()


class PrefixCache:
    """Blocks of `block_size` tokens by content, kept in `pool`. queries, hits: tokens looked up and found."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._pack = Struct(f"<{block_size}i").pack
        self.queries = 0
        self.hits = 0

    def match(self, request: Request) -> list[int]:
        """The longest run of blocks that holds the request's beginning: not yet shared, and never all its tokens.

        At least the last token has to be computed, for its logits; of a request that wants its prompt's logits all are.
        """
        if request.salt is None or request.scored < request.scored_end:
            return []
        self._extend_digests(request, (len(request.tokens) - 1) // self._block_size)
        found: list[int] = []
        for digest in request.digests:
            block = self._pool.find(digest)
            if block is None or (len(found) + 1) * self._block_size >= len(request.tokens):
                break
            found.append(block)
        return found

    def count(self, request: Request, blocks: int) -> None:
        """Put a started request into the statistics."""
        if request.salt is not None:
            self.queries += len(request.tokens)
            self.hits += blocks * self._block_size

    def register(self, request: Request) -> None:
        """Remember the blocks that the request has filled. Call it only once logits after them were finite.

        It is the dearest part of scheduling: so prompts are registered when they are read, outputs when they end.
        """
        if request.salt is None:
            return
        full = request.computed // self._block_size
        self._extend_digests(request, full)
        register, blocks, digests = self._pool.register, request.blocks, request.digests
        for index in range(request.registered, full):
            register(blocks[index], digests[index])
        request.registered = full

    def _extend_digests(self, request: Request, count: int) -> None:
        digests, tokens, size, pack = request.digests, request.tokens, self._block_size, self._pack
        assert request.salt is not None
        digest = digests[-1] if digests else _ROOT + request.salt
        for start in range(len(digests) * size, count * size, size):
            digest = sha256(digest + pack(*tokens[start : start + size])).digest()
            digests.append(digest)
