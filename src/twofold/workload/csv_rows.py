"""Reading csv: rows by column name, numbers with reasons, each error with its line."""

import csv
import math
import re
from collections.abc import Iterator, Sequence

from twofold.workload.lines import Lines

_WHOLE = re.compile(r"[+-]?[0-9]{1,30}")


def csv_fields(lines: Lines, line: str) -> list[str]:
    """The fields of one line. Each line is parsed alone: an open quote must not swallow those below it."""
    try:
        return [field.strip() for field in next(csv.reader((line,), strict=True))]
    except csv.Error as error:
        raise lines.error(f"not a csv line: {error}") from error


def csv_rows(lines: Lines, columns: Sequence[str]) -> Iterator[list[str]]:
    """The values of `columns`, in that order, of each row; other columns are ignored."""
    texts = iter(lines)
    header = csv_fields(lines, next(texts, ""))
    missing = [column for column in columns if column not in header]
    if missing:
        raise lines.error(f"missing column {', '.join(missing)} (the header has {', '.join(header)})")
    places = [header.index(column) for column in columns]
    for text in texts:
        fields = csv_fields(lines, text)
        if len(fields) != len(header):
            raise lines.error(f"{len(fields)} columns where the header has {len(header)}")
        yield [fields[place] for place in places]


def whole(lines: Lines, column: str, text: str) -> int:
    """A whole number in decimal digits."""
    if _WHOLE.fullmatch(text) is None:
        raise lines.error(f"{column} is {text!r}, which is not a whole number")
    return int(text)


def seconds(lines: Lines, column: str, text: str) -> float:
    """A time in seconds, finite and not negative."""
    try:
        value = float(text)
    except ValueError:
        raise lines.error(f"{column} is {text!r}, which is not a number") from None
    if not math.isfinite(value) or value < 0:
        raise lines.error(f"{column} is {text!r}, which is not a time in seconds from 0 on")
    return value
