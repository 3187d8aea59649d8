"""The config.json of a Hugging Face model directory, read field by field."""

from pathlib import Path

import msgspec

from twofold.errors import ModelError


class ConfigJson:
    """What the file says. Fields go by the first of several names that is there, since model families differ."""

    def __init__(self, directory: Path) -> None:
        """Raises ModelError where there is no config.json or it is not an object."""
        self.path = directory / "config.json"
        try:
            self._raw = msgspec.json.decode(self.path.read_bytes(), type=dict[str, object])
        except FileNotFoundError as error:
            raise ModelError(f"{directory} has no config.json, so it is not a model directory") from error
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read: {error.strerror}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ModelError(f"{self.path} is not a JSON object") from error

    def refuse(self, reason: str) -> ModelError:
        return ModelError(f"{self.path}: {reason}")

    def number(self, *names: str, default: int | None = None) -> int:
        """A whole number of at least 1, or `default` where no name is there; without one that is an error."""
        value = self.maybe(*names)
        if value is None and default is None:
            raise self.refuse(f"field {names[0]} is missing")
        return value if value is not None else default or 0

    def maybe(self, *names: str) -> int | None:
        """A whole number of at least 1; None where no name is there, or it says null."""
        for name in names:
            value = self._raw.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise self.refuse(f"field {name} must be a whole number of at least 1, not {value!r}")
            return value
        return None

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._raw.get(name)
        return value if isinstance(value, bool) else default

    def text(self, *names: str, default: str) -> str:
        for name in names:
            value = self._raw.get(name)
            if isinstance(value, str):
                return value
        return default

    def numbers(self, name: str) -> list[int]:
        """A list of whole numbers; empty where it is not there."""
        value = self._raw.get(name)
        return [each for each in value if isinstance(each, int)] if isinstance(value, list) else []

    def table(self, name: str) -> dict[str, object] | None:
        value = self._raw.get(name)
        return {str(key): each for key, each in value.items()} if isinstance(value, dict) else None
