"""Blocks on a disk: a flat file of slots, and an index of them in SQLite.

SQLite keeps the index whole however a process or the machine ends (WAL, one transaction for each change). A block is
written before it is entered and its slot is given away only after it was struck out, so what a process leaves behind
that is killed is whole. What a machine leaves behind that loses its power may not be: that, and what the
disk itself spoils, shows in the checksum, which is compared whenever a block is read.

The thread of a store that reads and writes its disk, so that questions do not wait for it.

The secret that a service's keys of blocks begin with, kept beside the blocks so that its next start finds them.
"""

import fcntl
import logging
import os
import secrets
import shutil
import sqlite3
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from heapq import heappop, heappush
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from twofold.errors import ConfigurationError
from twofold.serving.store.events import EventQueue
from twofold.serving.store.memory import SlotMemory
from twofold.serving.store.messages import DiskForget, DiskOperation, DiskRead, DiskSpare, DiskWrite

log = logging.getLogger(__name__)

_INDEX, _BLOCKS, _LOCK = "index.sqlite", "blocks", "lock"
# The index may take this much of the capacity: SQLite's pages, half full, and its log between two checkpoints.
_BYTES_PER_ROW = 256
_LOG_PAGES = 256
_INDEX_BYTES = 2 << 20

_SCHEMA = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = NORMAL",
    f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}",
    """CREATE TABLE IF NOT EXISTS blocks (
        key BLOB PRIMARY KEY, slot INTEGER UNIQUE NOT NULL, position INTEGER NOT NULL, checksum INTEGER NOT NULL,
        number INTEGER NOT NULL
    ) WITHOUT ROWID""",
    "CREATE TABLE IF NOT EXISTS meaning (one INTEGER PRIMARY KEY, contents TEXT NOT NULL)",
)


class _Row(NamedTuple):
    slot: int
    checksum: int


class Stored(NamedTuple):
    """A block on the disk: what it is called, and which one of its prompt it is."""

    key: bytes
    position: int


def check_directory(directory: Path, capacity_bytes: int) -> None:
    """Make the directory; raises ConfigurationError where a store could not have so much of it for itself."""
    os.close(_lock(directory))
    ours = (*directory.glob(f"{_INDEX}*"), *directory.glob(_BLOCKS))
    used = sum(path.stat().st_size for path in ours)
    free = shutil.disk_usage(directory).free + used
    if free < capacity_bytes:
        raise ConfigurationError(
            f"{directory} has {free / 2**30:,.1f} GiB left, and --kv-store-disk asks for {capacity_bytes / 2**30:,.1f} "
            "GiB there: give it less"
        )


def blocks_on_disk(capacity_bytes: int, block_bytes: int) -> int:
    """How many blocks so much of a disk has room for; raises ConfigurationError where that is none."""
    blocks = max(0, capacity_bytes - _INDEX_BYTES) // (block_bytes + _BYTES_PER_ROW)
    if not blocks:
        least = -(-(_INDEX_BYTES + block_bytes + _BYTES_PER_ROW) // 2**20)
        raise ConfigurationError(
            f"--kv-store-disk of {capacity_bytes / 2**20:,.1f} MiB has no room for a block of KV: "
            f"make it {least}MiB at least"
        )
    return blocks


class DiskBlocks:
    """Blocks of `block_bytes` bytes in a directory of this store's own, which never takes more than `capacity_bytes`.

    `contents` says what the blocks mean (the model, how its KV is laid out): those of another meaning are removed. All
    is to be called from one thread. Raises ConfigurationError where the directory cannot be had, or has no room.
    """

    def __init__(self, directory: Path, capacity_bytes: int, block_bytes: int, contents: str) -> None:
        self.capacity = blocks_on_disk(capacity_bytes, block_bytes)
        self._block_bytes = block_bytes
        self._directory = directory
        self._lock = _lock(directory)
        self._blocks: dict[bytes, _Row] = {}
        self._spare: dict[bytes, None] = {}  # those whose room may be taken, the oldest first
        self._recovered: list[Stored] = []
        self._number = 0
        self._index = self._open(f"{contents} {block_bytes}")
        taken = {row.slot for row in self._blocks.values()}
        self._free = [slot for slot in range(self.capacity) if slot not in taken]  # sorted, so it is a heap
        self._file = os.open(directory / _BLOCKS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self._file).st_size > self.capacity * block_bytes:
            os.ftruncate(self._file, self.capacity * block_bytes)

    def recovered(self) -> list[Stored]:
        """What an earlier life left behind, in the order in which it was written."""
        return self._recovered

    def write(self, key: bytes, position: int, block: memoryview, checksum: int) -> bool:
        """Keep a block; `checksum` is its CRC-32, as whoever made it computed it. False where that cannot be done."""
        self._spare.pop(key, None)
        if key in self._blocks:
            return True
        if not self._free and self._spare:
            self.remove(next(iter(self._spare)))
        if not self._free:
            return False
        slot = heappop(self._free)
        try:
            _write_all(self._file, block, slot * self._block_bytes)
            row = (key, slot, position, checksum, self._number)
            self._index.execute("INSERT INTO blocks VALUES (?, ?, ?, ?, ?)", row)
        except (OSError, sqlite3.Error) as error:
            log.error("a block could not be written to %s: %s", self._directory, error)  # noqa: TRY400  (one line)
            heappush(self._free, slot)
            return False
        self._number += 1
        self._blocks[key] = _Row(slot, checksum)
        return True

    def read(self, key: bytes, into: memoryview) -> int | None:
        """Read a block; returns its checksum, or None, with anything in `into`, where it is not there as it was."""
        row = self._blocks.get(key)
        if row is None:
            return None
        try:
            count = os.preadv(self._file, [into], row.slot * self._block_bytes)
        except OSError as error:
            log.error("a block could not be read from %s: %s", self._directory, error)  # noqa: TRY400
            return None
        if count < self._block_bytes or zlib.crc32(into) != row.checksum:
            log.error("a block in %s is not as it was written: it is dropped", self._directory)
            return None
        return row.checksum

    def spare(self, key: bytes) -> None:
        """A block is wanted no more, but may be again: it stays until its room is."""
        if key in self._blocks:
            self._spare[key] = None

    def remove(self, key: bytes) -> None:
        """Forget a block, if it is there."""
        self._spare.pop(key, None)
        row = self._blocks.get(key)
        if row is None:
            return
        try:
            self._index.execute("DELETE FROM blocks WHERE key = ?", (key,))
        except sqlite3.Error as error:
            # Its slot is not given away: the index would have two blocks in it.
            log.error("a block could not be struck out in %s: %s", self._directory, error)  # noqa: TRY400
            return
        del self._blocks[key]
        heappush(self._free, row.slot)

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._index.close()
        os.close(self._file)
        os.close(self._lock)

    def _open(self, contents: str) -> sqlite3.Connection:
        """The index of blocks with these contents; one that cannot be read, or is about others, is begun anew."""
        index = self._opened(contents)
        if index is not None:
            return index
        for path in (*self._directory.glob(f"{_INDEX}*"), self._directory / _BLOCKS):
            path.unlink(missing_ok=True)
        index = self._opened(contents)
        if index is None:
            raise ConfigurationError(
                f"{self._directory} cannot be had for the store: SQLite cannot write there"
            )
        return index

    def _opened(self, contents: str) -> sqlite3.Connection | None:
        """None, and a word in the log, where it has to be begun anew."""
        index = sqlite3.connect(self._directory / _INDEX, isolation_level=None, check_same_thread=False)
        try:
            for statement in _SCHEMA:
                index.execute(statement)
            index.execute("INSERT OR IGNORE INTO meaning VALUES (0, ?)", (contents,))
            if index.execute("SELECT contents FROM meaning").fetchone() == (contents,):
                self._recover(index)
                return index
            log.warning("%s has blocks of another model or layout: they are removed", self._directory)
        except sqlite3.Error as error:
            log.warning("the index in %s cannot be read (%s): its blocks are lost", self._directory, error)
        index.close()
        return None

    def _recover(self, index: sqlite3.Connection) -> None:
        """Take up what is there. What is beyond the capacity, which may have been more, is struck out."""
        if index.execute("DELETE FROM blocks WHERE slot >= ?", (self.capacity,)).rowcount:
            index.execute("VACUUM")
            index.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        rows = index.execute(
            "SELECT key, slot, position, checksum, number FROM blocks ORDER BY number"
        ).fetchall()
        for key, slot, position, checksum, number in rows:
            self._blocks[key] = _Row(slot, checksum)
            self._recovered.append(Stored(key, position))
            self._number = number + 1


def _write_all(fd: int, block: memoryview, offset: int) -> None:
    written = os.pwrite(fd, block, offset)
    if written < len(block):
        raise OSError(f"{written} of {len(block)} bytes were written")


def _lock(directory: Path) -> int:
    """Make the directory ours, for as long as what is returned is open."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be had for the store: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise ConfigurationError(f"{directory} is the store of another service: give each its own") from error
    return fd


class DiskResult(NamedTuple):
    """What came of a move: the checksum of the block that was written or read, None if it could not be."""

    move: DiskWrite | DiskRead
    checksum: int | None


class DiskThread:
    """Does moves one after the other, between `disk` and `memory`, whose slots have room for the disk's blocks.

    `fileno` is readable while there is something to `take`.
    """

    def __init__(self, disk: DiskBlocks, memory: SlotMemory) -> None:
        self._disk, self._memory = disk, memory
        self._moves: SimpleQueue[DiskOperation | None] = SimpleQueue()
        self._moved: EventQueue[DiskResult] = EventQueue()
        self._thread = threading.Thread(target=self._run, name="store-disk", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._moved.fileno()

    def begin(self, moves: list[DiskOperation]) -> None:
        """Queue moves; safe from any thread."""
        for move in moves:
            self._moves.put(move)

    def take(self) -> Iterator[DiskResult]:
        """What has been done since this was asked last."""
        return self._moved.drain()

    def close(self) -> None:
        """End when all that was begun is done."""
        self._moves.put(None)
        self._thread.join()
        self._moved.close()

    def _run(self) -> None:
        while (move := self._moves.get()) is not None:
            match move:
                case DiskWrite():
                    block = self._memory.slot(move.slot)
                    written = self._disk.write(move.key, move.position, block, move.checksum)
                    if move.spare:
                        self._disk.spare(move.key)
                    self._moved.put(DiskResult(move, move.checksum if written else None))
                case DiskRead():
                    self._moved.put(DiskResult(move, self._disk.read(move.key, self._memory.slot(move.slot))))
                case DiskSpare(key=key):
                    self._disk.spare(key)
                case DiskForget(key=key):
                    self._disk.remove(key)


_BYTES = 32


def load_or_create_secret(directory: Path) -> bytes:
    """That of this directory, made when it is first asked for; raises ConfigurationError where it cannot be kept."""
    path = directory / "secret"
    try:
        if path.exists() and len(secret := path.read_bytes()) == _BYTES:
            return secret
        secret = secrets.token_bytes(_BYTES)
        whole = path.with_suffix(".new")
        whole.unlink(missing_ok=True)
        with open(os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123  (its mode)
            file.write(secret)
        whole.replace(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be kept: {error.strerror}") from error
    return secret
