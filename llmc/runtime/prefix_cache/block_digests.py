"""Names for the blocks of a token sequence: a block's digest is SHA-256 over the digest of the block before it and its
own tokens, so it stands for the whole prefix. The chain starts from a salt, so tenants share no digests. A cut of the
request's rows is part of it too (cut_marks.py)."""

from collections.abc import Sequence
from hashlib import sha256
from struct import Struct

from llmc.program import CachePolicy
from llmc.runtime.prefix_cache.cut_marks import NO_MARKS, CutMarks

_ROOT = b"llmc prefix"


def prefix_salt(tenant: str | None, adapter: str | None = None) -> bytes:
    """The salt of a tenant's requests with an adapter; requests without a tenant share one.

    adapter: the digest of its content, so that other weights under the same name find nothing.
    """
    of_tenant = b"" if tenant is None else sha256(tenant.encode()).digest()
    return of_tenant if adapter is None else of_tenant + b" adapter " + bytes.fromhex(adapter)


def root(salt: bytes) -> bytes:
    """The digest before a sequence's first block."""
    return _ROOT + salt


class BlockDigests:
    """Computes the digests of blocks of `block_size` tokens, which identify prefixes.

    policies: those that the engine was built for, of its groups of caches.
    """

    def __init__(self, block_size: int, policies: Sequence[CachePolicy] = ()) -> None:
        self._block_size = block_size
        self._policies = tuple(policy for policy in policies if policy.drops_rows)
        self._pack = Struct(f"<{block_size}i").pack

    def marks(self, policy: CachePolicy | None, prompt: int) -> CutMarks:
        """The cuts of a request.

        Args:
            policy: The policy that the request has chosen, if any.
            prompt: Number of tokens of its prompt.
        """
        if not self._policies:
            return NO_MARKS
        own = [policy if policy is not None and built.per_request else built for built in self._policies]
        return CutMarks(own, prompt, self._block_size)

    def after(self, parent: bytes, tokens: Sequence[int], index: int, marks: CutMarks = NO_MARKS) -> bytes:
        """The digest of the index-th block of the tokens.

        Args:
            parent: The digest of the block before it, or the root.
            tokens: All tokens of the request.
            index: Number of the block.
            marks: The cuts of the request.
        """
        start = index * self._block_size
        own = self._pack(*tokens[start : start + self._block_size])
        return sha256(parent + marks.before(index) + own).digest()

    def of_prompt(self, tokens: Sequence[int], salt: bytes, marks: CutMarks = NO_MARKS) -> list[bytes]:
        """The digests of all blocks that a request with these tokens may find. At least the last token must be
        computed."""
        parent, digests = root(salt), []
        for index in range((len(tokens) - 1) // self._block_size):
            parent = self.after(parent, tokens, index, marks)
            digests.append(parent)
        return digests
