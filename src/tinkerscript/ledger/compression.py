"""Compression of the ledger's calls and tokens."""

from __future__ import annotations

import zstandard

# Smaller calls are mostly ids and logprobs, which do not compress.
PAYS_FROM = 1024

ZSTD_LEVEL = 1  # Higher levels are slower, and logprobs barely compress.

# A few bytes of a stranger's ledger could expand to gigabytes.
MAX_CALL_BYTES = 256 * 2**20

_compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)


def packed(data: bytes) -> bytes:
    """Compress `data` if it is large. Not thread-safe."""
    return _compressor.compress(data) if len(data) >= PAYS_FROM else data


def unpacked(data: bytes) -> bytes:
    """Undo `packed`. Raises ValueError for any other bytes."""
    if not data.startswith(zstandard.FRAME_HEADER):
        return data
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= MAX_CALL_BYTES:
            raise ValueError(
                f"{size} bytes are packed, more than the limit of {MAX_CALL_BYTES} (-1: size unknown)"
            )
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise ValueError(f"not packed bytes: {error}") from error
