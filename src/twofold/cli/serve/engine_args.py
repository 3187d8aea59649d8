"""Options of vLLM on the command line: a file, JSON, or vLLM's own flags after `--`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from twofold.cli.serve.settings import EngineSettings, ServeSettings
from twofold.cli.settings import flag_name, flags_of, refuse
from twofold.errors import ConfigurationError, require
from twofold.hardware.suggestions import read_yaml
from twofold.instance import Role

PHASE_ENGINE_ARGS: Final = "prefill_engine_args decode_engine_args"


def engine_args(settings: ServeSettings) -> dict[Role, tuple[str, ...]]:
    """Return vLLM's options for the workers of each role, as flags of vLLM's command line.

    Raise ConfigurationError if an option is unreadable, or set by a flag of `twofold serve` too.
    """
    if settings.colocated:
        refuse(settings, PHASE_ENGINE_ARGS, "is for a service with separate phases: with --colocated use --engine-args")
    common, prefill, decode = (
        tuple(_vllm_flags(settings, name)) for name in ("engine_args", *PHASE_ENGINE_ARGS.split())
    )
    return {Role.PREFILL: common + prefill, Role.DECODE: common + decode, Role.MIXED: common}


def _vllm_flags(settings: ServeSettings, name: str) -> Iterator[str]:
    for text in getattr(settings, name):
        given = _read(flag_name(name), text)
        made = given if isinstance(given, list) else [each for item in given.items() for each in _as_flag(*item)]
        for each in made:
            option = each.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")
            if each.startswith("--") and option in flags_of(EngineSettings) and getattr(settings, option) is not None:
                raise ConfigurationError(f"{flag_name(name)} sets {option}, as {flag_name(option)} does: give one")
            yield each


def _read(flag: str, text: str) -> Any:  # noqa: ANN401  (a mapping, or vLLM's flags as a list)
    inline = text.lstrip().startswith(("{", "["))
    try:
        given = msgspec.yaml.decode(text) if inline else read_yaml(flag, Path(text))
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigurationError(f"{flag} {text} is not JSON: {' '.join(str(error).split())}") from error
    require(inline or isinstance(given, dict), f"{flag} {text} is not a mapping of options, as in `max_logprobs: 5`")
    return given


def _as_flag(name: object, value: object) -> Iterator[str]:
    option = flag_name(str(name))
    if isinstance(value, bool):
        yield option if value else f"--no-{option[2:]}"
    elif isinstance(value, list):
        yield from (option, *map(_as_text, value))
    else:
        yield f"{option}={_as_text(value)}"


def _as_text(value: object) -> str:
    return msgspec.json.encode(value).decode() if isinstance(value, dict | list) else str(value)
