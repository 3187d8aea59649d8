"""What the nursery, or who else starts workers, tells the launcher, and is told: one JSON object a line each way."""

import msgspec


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event: a `stage` begins; a `failure` in one sentence; a worker `exited`, and `why` if that is known; facts of
    the model; the workers that are `waiting` for room, of those that should run.

    `max_model_len` (tokens), `vocab_size` and the `model` that it serves come with the stage "starting workers".
    """

    stage: str | None = None
    failure: str | None = None
    exited: str | None = None
    code: int | None = None
    why: str | None = None
    waiting: tuple[str, ...] | None = None
    max_model_len: int | None = None
    vocab_size: int | None = None
    model: str | None = None


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`start` a worker that has ended, `kill` one that must not go on, `free` what is kept for one that has ended and
    is not wanted now, or `finish` with the last."""

    start: str | None = None
    kill: str | None = None
    free: str | None = None
    finish: bool = False
