"""What the nursery tells the launcher, and what it is told: one JSON object a line each way."""

import msgspec


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event: a `stage` begins; a `failure` in one sentence; a worker `exited`; facts of the model.

    `max_model_len` (tokens), `vocab_size` and the `model` that it serves come with the stage "starting workers".
    """

    stage: str | None = None
    failure: str | None = None
    exited: str | None = None
    code: int | None = None
    max_model_len: int | None = None
    vocab_size: int | None = None
    model: str | None = None


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """To the nursery: `start` a worker that has ended, `kill` one that must not go on, or `finish` with the last."""

    start: str | None = None
    kill: str | None = None
    finish: bool = False
