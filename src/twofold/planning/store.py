"""Evaluations on disk, so that a plan which was interrupted, or is asked for again, simulates nothing twice."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, Self

import msgspec

from twofold.errors import ConfigurationError
from twofold.planning.evaluation import Evaluation

_LAYOUT = 1
_BUSY_S = 30.0  # another plan may be writing to the same file
_CREATE = "CREATE TABLE IF NOT EXISTS evaluations (key TEXT PRIMARY KEY, trial TEXT NOT NULL, evaluation BLOB NOT NULL)"


class Store(Protocol):
    """Keeps evaluations by key."""

    def get(self, key: str) -> Evaluation | None: ...

    def put(self, key: str, trial: str, evaluation: Evaluation) -> None:
        """Keep an evaluation; `trial` says in words what it is of."""
        ...


class NoStore:
    """Forgets everything."""

    def get(self, key: str) -> Evaluation | None:  # noqa: ARG002
        return None

    def put(self, key: str, trial: str, evaluation: Evaluation) -> None:
        """Nothing."""


class SqliteStore:
    """A SQLite file; each evaluation is on disk before `put` returns, and several plans may share the file.

    Raises ConfigurationError where the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._explained():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
            (layout,) = self._database.execute("PRAGMA user_version").fetchone()
            if layout not in {0, _LAYOUT}:
                raise ConfigurationError(
                    f"{path} was written by another version of Twofold: name another --store"
                )
            if not layout and self._tables() - {"evaluations"}:
                raise ConfigurationError(f"{path} is a database of something else: name another --store")
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute(_CREATE)
            self._database.execute(f"PRAGMA user_version={_LAYOUT}")

    def _tables(self) -> set[str]:
        rows = self._database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return {name for (name,) in rows}

    def get(self, key: str) -> Evaluation | None:
        with self._explained():
            row = self._database.execute(
                "SELECT evaluation FROM evaluations WHERE key = ?", (key,)
            ).fetchone()
            return None if row is None else msgspec.json.decode(row[0], type=Evaluation)

    def put(self, key: str, trial: str, evaluation: Evaluation) -> None:
        with self._explained():
            self._database.execute(
                "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?)",
                (key, trial, msgspec.json.encode(evaluation)),
            )

    def __len__(self) -> int:
        (count,) = self._database.execute("SELECT count(*) FROM evaluations").fetchone()
        return int(count)

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, msgspec.DecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigurationError(f"store {self._path} cannot be used: {reason}") from error
