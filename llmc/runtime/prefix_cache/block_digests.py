"""Names for the blocks of a token sequence: a block's digest is SHA-256 over the digest of the block before it and its
own tokens, so it stands for the whole prefix. The chain starts from a salt, so tenants share no digests."""

from collections.abc import Sequence
from hashlib import sha256
from struct import Struct

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
    """Computes the digests of blocks of `block_size` tokens, which identify prefixes."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pack = Struct(f"<{block_size}i").pack

    def after(self, parent: bytes, tokens: Sequence[int], index: int) -> bytes:
        """The digest of the index-th block of the tokens. parent: the digest of the block before it, or the root."""
        start = index * self._block_size
        return sha256(parent + self._pack(*tokens[start : start + self._block_size])).digest()

    def of_prompt(self, tokens: Sequence[int], salt: bytes) -> list[bytes]:
        """The digests of all blocks that a request with these tokens may find. At least the last token must be
        computed."""
        parent, found = root(salt), []
        for index in range((len(tokens) - 1) // self._block_size):
            parent = self.after(parent, tokens, index)
            found.append(parent)
        return found
