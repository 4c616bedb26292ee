"""Zstd compression of calls, tokens and transcripts (docs/ledger.md#compression).

A dictionary is committed before the first frame that names it, or with it, and it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import zstandard

# Smaller calls barely compress without a dictionary: they are mostly ids and logprobs.
PAYS_FROM = 1024

# Larger blobs repeat themselves enough, and would occupy the event loop.
SMALL_BLOB = 32 * 2**10

DICTIONARY_BLOBS = 64
DICTIONARY_BYTES = 16 * 2**10

ZSTD_LEVEL = 1  # Logprobs barely compress.
LEVELS = {"transcripts": 7}  # Text, once per claim: 45 us of 6 kB, and 10% smaller than at level 1.

# A few bytes of a stranger's ledger could expand to gigabytes.
MAX_CALL_BYTES = 256 * 2**20

DICTIONARIES = "SELECT name, value FROM {s}facts WHERE name LIKE 'dictionary/%'"

_compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)


class Dictionaries(dict[int, zstandard.ZstdCompressionDict]):
    def __init__(self, read: Callable[[], Iterable[bytes]]) -> None:
        self._read = read

    def add(self, content: bytes) -> zstandard.ZstdCompressionDict:
        dictionary = zstandard.ZstdCompressionDict(content)
        self[dictionary.dict_id()] = dictionary
        return dictionary

    def __missing__(self, number: int) -> zstandard.ZstdCompressionDict:
        for content in self._read():
            self.add(content)
        if number in self:
            return self[number]
        raise ValueError(f"the ledger has no dictionary {number}, which compressed this")


NO_DICTIONARIES = Dictionaries(lambda: ())


class Packer:
    """Not thread-safe."""

    def __init__(self, train: Callable[[str, list[bytes]], None]) -> None:
        """`train` gets, once per table without a dictionary, its first `DICTIONARY_BLOBS` small blobs."""
        self.dictionaries = Dictionaries(lambda: ())
        self._train = train
        self._samples: dict[str, list[bytes]] = {}
        self._compressors: dict[str, zstandard.ZstdCompressor] = {}

    def use(self, table: str, content: bytes) -> None:
        dictionary, level = self.dictionaries.add(content), LEVELS.get(table, ZSTD_LEVEL)
        self._compressors[table] = zstandard.ZstdCompressor(level=level, dict_data=dictionary)

    def pack(self, table: str, data: bytes) -> bytes:
        """Zstd frames stay as they are."""
        if not data or data.startswith(zstandard.FRAME_HEADER):
            return data
        if len(data) <= SMALL_BLOB:
            compressor = self._compressors.get(table)
            if compressor is not None:
                return min(compressor.compress(data), data, key=len)
            self._sample(table, data)
        return packed(data)

    def _sample(self, table: str, data: bytes) -> None:
        samples = self._samples.setdefault(table, [])
        if len(samples) < DICTIONARY_BLOBS:
            samples.append(data)
            if len(samples) == DICTIONARY_BLOBS:
                self._train(table, samples)


def trained(samples: list[bytes]) -> bytes:
    """Return a dictionary, or b"" for too few bytes. Takes tens of milliseconds, without the GIL."""
    try:
        return zstandard.train_dictionary(DICTIONARY_BYTES, [*samples]).as_bytes()
    except zstandard.ZstdError:
        return b""


def packed(data: bytes) -> bytes:
    """Not thread-safe."""
    return _compressor.compress(data) if len(data) >= PAYS_FROM else data


def opened(data: bytes) -> bytes:
    """Unpack a client's small frame, so that the ledger can use a dictionary; leave other bytes."""
    try:
        content = unpacked(data, limit=SMALL_BLOB)
    except ValueError:  # A large or broken frame stays for people to see.
        return data
    return data if not content or content.startswith(zstandard.FRAME_HEADER) else content


def unpacked(data: bytes, dictionaries: Dictionaries = NO_DICTIONARIES, *, limit: int | None = None) -> bytes:
    """Undo the compression, if any.

    Raises ValueError for a broken frame, an unknown dictionary, or (before unpacking) more than `limit`
    bytes. None means `MAX_CALL_BYTES`.
    """
    if not data.startswith(zstandard.FRAME_HEADER):
        return data
    limit = MAX_CALL_BYTES if limit is None else limit
    try:
        size, number = zstandard.frame_content_size(data), zstandard.get_frame_parameters(data).dict_id
        if size > limit:
            raise ValueError(f"{size} bytes are packed, more than the limit of {limit}")
        dictionary = dictionaries[number] if number else None
        # Bounds frames that do not name their size.
        return zstandard.ZstdDecompressor(dict_data=dictionary).decompress(data, max_output_size=limit)
    except zstandard.ZstdError as error:
        raise ValueError(f"not packed bytes: {error}") from error
