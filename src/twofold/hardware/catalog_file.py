"""Files of the catalog: TOML with a table per accelerator, machine, link, tier or model.

An entry is kept as it was written until all files are read, because a later one may change a field of it.
"""

import datetime as dt
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from twofold.errors import ConfigurationError
from twofold.hardware.machine import Accelerator, Link, Machine, StorageTier
from twofold.hardware.mistakes import explain, near, unknown
from twofold.hardware.model import Model

T = TypeVar("T", bound=msgspec.Struct)

KINDS: dict[str, type[msgspec.Struct]] = {
    "accelerators": Accelerator,
    "machines": Machine,
    "links": Link,
    "tiers": StorageTier,
    "models": Model,
}


class Entry(msgspec.Struct, frozen=True):
    """The fields of one table, and the place that people find it at."""

    where: str
    fields: dict[str, object]

    def changed_by(self, later: "Entry") -> "Entry":
        """This entry with the fields of a later one, which names its file as source unless it states one."""
        source = f"{later.where}; the rest: {self.fields.get('source')}"
        return Entry(later.where, {**self.fields, "source": source, **later.fields})

    def refuse(self, field: str, reason: str) -> ConfigurationError:
        return ConfigurationError(f"{self.where}: field {field}: {reason}")


Sections = Mapping[str, Mapping[str, Entry]]


def read_file(path: Path) -> Sections:
    """The entries of a user's file; raises ConfigurationError for what cannot be read or is not of the catalog."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigurationError(f"catalog {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"catalog {path} is not a text file in UTF-8") from error
    return read_text(text, str(path))


def read_text(text: str, name: str) -> Sections:
    """The entries of a file with this content; `name` is what the file is called in complaints."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"catalog {name} is not TOML: {error}") from error
    for section in raw:
        if section not in KINDS:
            raise ConfigurationError(f"catalog {name}: {unknown('section', section, KINDS)}")
    return {section: _entries(section, raw.get(section, {}), name) for section in KINDS}


def merge(earlier: Sections, later: Sections) -> Sections:
    """Both; an entry of the later file changes the fields it names of an earlier one with its name."""
    return {
        section: {
            **earlier[section],
            **{
                name: earlier[section][name].changed_by(entry) if name in earlier[section] else entry
                for name, entry in later[section].items()
            },
        }
        for section in KINDS
    }


def build(name: str, entry: Entry, kind: type[T]) -> T:
    """The value that an entry describes; raises ConfigurationError with file, entry and field if it describes none."""
    known = [field for field in kind.__struct_fields__ if field != "name"]
    for field in entry.fields:
        if field not in known:
            raise entry.refuse(field, f"there is no such field{near(field, known)}")
    try:
        return msgspec.convert({"name": name, **entry.fields}, kind)
    except msgspec.ValidationError as error:
        place, what = explain(error)
        if not place:  # a field that is not there has no place of its own: the reason names it
            raise ConfigurationError(f"{entry.where}: {what}") from error
        raise entry.refuse(place, what) from error


def _entries(section: str, tables: object, name: str) -> dict[str, Entry]:
    """The tables of one section."""
    place = f"catalog {name}"
    if not isinstance(tables, dict):
        raise ConfigurationError(
            f"{place}: {section} must hold a table for each name, as in [{section}.mine]"
        )
    entries = {}
    for key, fields in tables.items():
        entry = Entry(f"{place}: {section}.{key}", fields if isinstance(fields, dict) else {})
        if not isinstance(fields, dict):
            raise ConfigurationError(f"{entry.where} must be a table of fields, as in [{section}.mine]")
        entries[key] = Entry(
            entry.where, {field: _plain(entry, field, value) for field, value in fields.items()}
        )
    return entries


def _plain(entry: Entry, field: str, value: object) -> object:
    """A value as TOML has it, made what was meant: 80e9 is an integer, and 2024-06-01 may be written bare."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise entry.refuse(field, f"{value} is not a number to reckon with")
        return int(value) if value.is_integer() else value
    return value.isoformat() if isinstance(value, dt.date) else value
