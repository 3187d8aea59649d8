"""KV blocks on disk: a data file, an SQLite index, and a thread for disk reads and writes.

After a crash of the process, the index contains only complete blocks. Checksums detect damaged blocks.
"""

import fcntl
import logging
import os
import secrets
import shutil
import sqlite3
import zlib
from contextlib import suppress
from heapq import heappop, heappush
from pathlib import Path

from twofold.errors import ConfigurationError, require
from twofold.serving.store.events import StoreThread
from twofold.serving.store.messages import Block, DiskForget, DiskOperation, DiskRead, DiskSpare, DiskWrite
from twofold.transport.memory import SlotMemory

log = logging.getLogger(__name__)

_INDEX, _BLOCKS, _LOCK = "index.sqlite", "blocks", "lock"
# Share of the capacity for the index: SQLite's pages, half full, and its log between two checkpoints.
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


def check_directory(directory: Path, capacity_bytes: int) -> None:
    """Create the store's directory. Raises ConfigurationError if it is in use or has too little free space."""
    os.close(_lock(directory))
    ours = (*directory.glob(f"{_INDEX}*"), *directory.glob(_BLOCKS))
    used = sum(path.stat().st_size for path in ours)
    free = shutil.disk_usage(directory).free + used
    require(
        free >= capacity_bytes,
        f"--kv-store-disk of {capacity_bytes / 2**30:,.1f} GiB exceeds the {free / 2**30:,.1f} GiB free in {directory}",
    )


def blocks_on_disk(capacity_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks that fit into `capacity_bytes`. Raises ConfigurationError if no block fits."""
    blocks = max(0, capacity_bytes - _INDEX_BYTES) // (block_bytes + _BYTES_PER_ROW)
    least = -(-(_INDEX_BYTES + block_bytes + _BYTES_PER_ROW) // 2**20)
    require(
        blocks > 0,
        f"--kv-store-disk of {capacity_bytes / 2**20:,.1f} MiB is smaller than one KV block: "
        f"set it to at least {least}MiB",
    )
    return blocks


class DiskBlocks:
    """KV blocks on disk, in a directory that this process locks. Blocks of another model or KV layout are deleted.
    Raises ConfigurationError if the directory is unavailable or too small. Not thread-safe.
    """

    def __init__(self, directory: Path, capacity_bytes: int, block_bytes: int, contents: str) -> None:
        self.capacity = blocks_on_disk(capacity_bytes, block_bytes)
        self._block_bytes = block_bytes
        self._directory = directory
        self._lock = _lock(directory)
        self._blocks: dict[bytes, Block] = {}
        self._spare: dict[bytes, None] = {}  # replaceable blocks, oldest first
        # Keys and positions of blocks that earlier processes have written, oldest first.
        self.recovered: list[tuple[bytes, int]] = []
        self._number = 0
        self._index = self._open(f"{contents} {block_bytes}")
        taken = {row.slot for row in self._blocks.values()}
        self._free = [slot for slot in range(self.capacity) if slot not in taken]  # sorted, so it is a heap
        self._file = os.open(directory / _BLOCKS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self._file).st_size > self.capacity * block_bytes:
            os.ftruncate(self._file, self.capacity * block_bytes)

    def write(self, key: bytes, position: int, block: memoryview, checksum: int) -> bool:
        """Write a block with its CRC-32 `checksum`; return False if the disk is full or fails."""
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
            log.error("cannot write a block to %s: %s", self._directory, error)  # noqa: TRY400  (one line)
            heappush(self._free, slot)
            return False
        self._number += 1
        self._blocks[key] = Block(slot, checksum)
        return True

    def read(self, key: bytes, into: memoryview) -> int | None:
        """Read a block into the buffer `into`. Return its checksum; None if it is missing, unreadable or damaged."""
        row = self._blocks.get(key)
        if row is None:
            return None
        try:
            count = os.preadv(self._file, [into], row.slot * self._block_bytes)
        except OSError as error:
            log.error("cannot read a block from %s: %s", self._directory, error)  # noqa: TRY400
            return None
        if count < self._block_bytes or zlib.crc32(into) != row.checksum:
            log.error("checksum mismatch in %s: block dropped", self._directory)
            return None
        return row.checksum

    def spare(self, key: bytes) -> None:
        """Mark a block as replaceable: it stays on disk until its space is needed."""
        if key in self._blocks:
            self._spare[key] = None

    def remove(self, key: bytes) -> None:
        self._spare.pop(key, None)
        row = self._blocks.get(key)
        if row is None:
            return
        try:
            self._index.execute("DELETE FROM blocks WHERE key = ?", (key,))
        except sqlite3.Error as error:
            # Keep the slot: otherwise the index would contain two blocks for it.
            log.error("cannot delete a block in %s: %s", self._directory, error)  # noqa: TRY400
            return
        del self._blocks[key]
        heappush(self._free, row.slot)

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._index.close()
        os.close(self._file)
        os.close(self._lock)

    def _open(self, contents: str) -> sqlite3.Connection:
        index = self._opened(contents)
        if index is not None:
            return index
        for path in (*self._directory.glob(f"{_INDEX}*"), self._directory / _BLOCKS):
            path.unlink(missing_ok=True)
        index = self._opened(contents)
        if index is None:
            raise ConfigurationError(f"cannot use {self._directory} for the store: SQLite cannot write there")
        return index

    def _opened(self, contents: str) -> sqlite3.Connection | None:
        index = sqlite3.connect(self._directory / _INDEX, isolation_level=None, check_same_thread=False)
        try:
            for statement in _SCHEMA:
                index.execute(statement)
            index.execute("INSERT OR IGNORE INTO meaning VALUES (0, ?)", (contents,))
            if index.execute("SELECT contents FROM meaning").fetchone() == (contents,):
                self._recover(index)
                return index
            log.warning("deleting the blocks of another model or layout in %s", self._directory)
        except sqlite3.Error as error:
            log.warning("cannot read the index in %s (%s): its blocks are lost", self._directory, error)
        index.close()
        return None  # the index must be created again

    def _recover(self, index: sqlite3.Connection) -> None:
        # The capacity may have shrunk.
        if index.execute("DELETE FROM blocks WHERE slot >= ?", (self.capacity,)).rowcount:
            index.execute("VACUUM")
            index.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        rows = index.execute("SELECT key, slot, position, checksum, number FROM blocks ORDER BY number").fetchall()
        for key, slot, position, checksum, number in rows:
            self._blocks[key] = Block(slot, checksum)
            self.recovered.append((key, position))
            self._number = number + 1


def _write_all(fd: int, block: memoryview, offset: int) -> None:
    written = os.pwrite(fd, block, offset)
    if written < len(block):
        raise OSError(f"{written} of {len(block)} bytes were written")


def _lock(directory: Path) -> int:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigurationError(f"cannot use {directory} for the store: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise ConfigurationError(f"{directory} is in use by another service: choose another directory") from error
    return fd


# A block that was read or written, and its checksum, or None after a failure.
DiskResult = tuple[DiskWrite | DiskRead, int | None]


class DiskThread(StoreThread[DiskOperation, DiskResult]):
    """Thread that copies blocks between disk and memory, and deletes blocks on disk."""

    def __init__(self, disk: DiskBlocks, memory: SlotMemory) -> None:
        self._disk, self._memory = disk, memory
        super().__init__("store-disk")

    def _run(self) -> None:
        while (move := self._work.get()) is not None:
            match move:
                case DiskWrite():
                    block = self._memory.slot(move.slot)
                    written = self._disk.write(move.key, move.position, block, move.checksum)
                    if move.spare:
                        self._disk.spare(move.key)
                    self._results.put((move, move.checksum if written else None))
                case DiskRead():
                    self._results.put((move, self._disk.read(move.key, self._memory.slot(move.slot))))
                case DiskSpare(key=key):
                    self._disk.spare(key)
                case DiskForget(key=key):
                    self._disk.remove(key)


_BYTES = 32


def load_or_create_secret(directory: Path) -> bytes:
    """Read the 32-byte salt of block keys from `directory`, or create it. Raises ConfigurationError if this fails."""
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
        raise ConfigurationError(f"cannot read or write {path}: {error.strerror}") from error
    return secret
