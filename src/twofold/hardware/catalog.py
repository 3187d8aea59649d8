"""The catalog: accelerators, machines, links, tiers and models by name, from data files with a source for each."""

import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

import msgspec

from twofold.errors import ConfigurationError
from twofold.hardware.catalog_file import KINDS, Entry, Sections, build, merge, read_file, read_text
from twofold.hardware.hf_config import read_model
from twofold.hardware.machine import Accelerator, Link, Machine, StorageTier
from twofold.hardware.mistakes import near, unknown
from twofold.hardware.model import Model

ENVIRONMENT: Final = "TWOFOLD_CATALOG"
_FAMILY: Final = "dgx-"


class Catalog(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known by name. Names that are not known raise ConfigurationError with the nearest and all of them."""

    accelerators: dict[str, Accelerator]
    machines: dict[str, Machine]
    links: dict[str, Link]
    tiers: dict[str, StorageTier]
    models: dict[str, Model]

    def accelerator(self, name: str) -> Accelerator:
        try:
            return self.accelerators[name]
        except KeyError:
            raise unknown("accelerator", name, self.accelerators) from None

    def machine(self, name: str) -> Machine:
        """A machine by its name, or `dgx-x` by the name `x`."""
        for full in (name, f"{_FAMILY}{name}"):
            if full in self.machines:
                return self.machines[full]
        short = (full.removeprefix(_FAMILY) for full in self.machines)
        raise unknown("machine", name, self.machines, also=short)

    def link(self, name: str) -> Link:
        try:
            return self.links[name]
        except KeyError:
            raise unknown("link", name, self.links) from None

    def tier(self, name: str) -> StorageTier:
        try:
            return self.tiers[name]
        except KeyError:
            raise unknown("tier", name, self.tiers) from None

    def model(self, name: str) -> Model:
        """A model by its name, or of a directory that holds a Hugging Face config.json.

        Raises ModelError for a directory that cannot be understood.
        """
        if name in self.models:
            return self.models[name]
        directory = Path(name).expanduser()
        if name and directory.is_dir():
            return read_model(directory)
        owner, slash, last = name.rpartition("/")
        if slash:  # a path, or a name as model hubs write it: the last part is what may be near
            hint = near(last, self.models)
            raise ConfigurationError(
                f"model {owner}/{last} is neither a directory with a config.json nor a name of the catalog{hint}"
            )
        raise unknown("model", name, self.models)


def load_catalog(extra: Sequence[Path] = ()) -> Catalog:
    """The catalog of the package, changed and extended by files: those of the environment variable
    TWOFOLD_CATALOG, then `extra`, in order. A table of a later file may name only the fields that it changes.

    Raises ConfigurationError with file, entry and field for a file that cannot be read or understood.
    """
    sections = _package()
    for path in (*_environment(), *extra):
        sections = merge(sections, read_file(path))
    accelerators = {name: build(name, entry, Accelerator) for name, entry in sections["accelerators"].items()}
    return Catalog(
        accelerators=accelerators,
        machines={
            name: build(name, _equipped(entry, sections["accelerators"]), Machine)
            for name, entry in sections["machines"].items()
        },
        links={name: build(name, entry, Link) for name, entry in sections["links"].items()},
        tiers={name: build(name, entry, StorageTier) for name, entry in sections["tiers"].items()},
        models={
            name: _checked(build(name, entry, Model), entry) for name, entry in sections["models"].items()
        },
    )


@cache
def _package() -> Sections:
    """The entries of the files that come with the package."""
    folder = files("twofold.hardware").joinpath("data")
    sections: Sections = {section: {} for section in KINDS}
    for section in KINDS:
        name = f"{section}.toml"
        sections = merge(sections, read_text(folder.joinpath(name).read_text(encoding="utf-8"), name))
    return sections


def _environment() -> list[Path]:
    return [Path(part) for part in os.environ.get(ENVIRONMENT, "").split(os.pathsep) if part]


def _equipped(entry: Entry, accelerators: Mapping[str, Entry]) -> Entry:
    """A machine's entry with its accelerator in place of the accelerator's name."""
    name = entry.fields.get("accelerator")
    if name is None:
        return entry
    if not isinstance(name, str):
        raise entry.refuse("accelerator", "it must be the name of an accelerator")
    if name not in accelerators:
        raise entry.refuse("accelerator", str(unknown("accelerator", name, accelerators)))
    return Entry(entry.where, {**entry.fields, "accelerator": {"name": name, **accelerators[name].fields}})


def _checked(model: Model, entry: Entry) -> Model:
    """The model, if its figures can all be true at once."""
    if model.heads % model.kv_heads:
        raise entry.refuse("kv_heads", f"{model.heads} heads cannot share {model.kv_heads} KV heads evenly")
    if model.active_parameters > model.parameters:
        raise entry.refuse("active_parameters", "there cannot be more of them than parameters")
    return model
