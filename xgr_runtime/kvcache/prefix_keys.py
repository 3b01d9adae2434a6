"""What a prompt's pages are known by: digests of all tokens up to their end. No torch: property-tested anywhere.

Keys need no trust in the caller: a digest of 32 bytes has no collisions that anybody can make.
"""

import hashlib
from dataclasses import dataclass

from xgr_runtime.types import Int64Array

KEY_BYTES = 32


def root_key(weights: str, kv_layout: str, page_size: int) -> bytes:
    """The parent key of a history's first page: what else the keys and values depend on."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in (weights, kv_layout, str(page_size)):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


@dataclass(frozen=True)
class PrefixKeys:
    """The key of each page of a prompt, whose last page may be partly filled, and what the keys are made of.

    root: parent key of the first page. content: all tokens, token_bytes each. page_size: in tokens.
    """

    root: bytes
    pages: tuple[bytes, ...]
    content: bytes
    token_bytes: int
    page_size: int

    def parent_of(self, page: int) -> bytes:
        """The key of what comes before a page of the prompt."""
        return self.pages[page - 1] if page else self.root

    def content_of(self, page: int, end_token: int | None = None) -> bytes:
        """A page's own tokens as bytes, those before token number `end_token` of the prompt."""
        first, end = page * self.page_size, (page + 1) * self.page_size
        if end_token is not None:
            end = min(end, end_token)
        return self.content[first * self.token_bytes : end * self.token_bytes]


def prefix_keys(root: bytes, token_ids: Int64Array, page_size: int) -> PrefixKeys:
    """The keys of a prompt; token_ids int64 [n], the content of a page is its tokens."""
    content, width = token_ids.tobytes(), page_size * token_ids.itemsize
    keys, parent = [], root
    for start in range(0, len(content), width):
        page = content[start : start + width]
        parent = hashlib.blake2b(page, key=parent, digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return PrefixKeys(root, tuple(keys), content, token_ids.itemsize, page_size)
