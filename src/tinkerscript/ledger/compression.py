"""Bytes of the ledger that are compressed where that pays."""

from __future__ import annotations

import zstandard

PAYS_FROM = 1024
"""Bytes. A smaller call is mostly ids and logprobs, and stays as it is."""

ZSTD_LEVEL = 1
"""Of zstd: logprobs barely compress at any level."""

MAX_CALL_BYTES = 256 * 2**20
"""Of one call. A ledger may be from elsewhere, where a few bytes can stand for gigabytes."""

_compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)


def packed(data: bytes) -> bytes:
    """`data`, compressed if it is large. For one thread."""
    return _compressor.compress(data) if len(data) >= PAYS_FROM else data


def unpacked(data: bytes) -> bytes:
    """What was packed. Raises ValueError for what `packed` did not make."""
    if not data.startswith(zstandard.FRAME_HEADER):
        return data
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= MAX_CALL_BYTES:
            raise ValueError(
                f"{size} bytes are packed, and at most {MAX_CALL_BYTES} are taken (-1: it does not say)"
            )
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise ValueError(f"not packed bytes: {error}") from error
