"""Options of vLLM on the command line: a file, JSON, or vLLM's own flags after `--`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from twofold.cli.serve.settings import EngineSettings, ServeSettings
from twofold.cli.settings import flag_name, flags_of, refuse
from twofold.errors import ConfigurationError
from twofold.hardware.suggestions import parse_yaml, read_yaml
from twofold.instance import Role

PHASE_ENGINE_ARGS: Final = "prefill_engine_args decode_engine_args"


def engine_args(settings: ServeSettings) -> dict[Role, tuple[str, ...]]:
    """Return vLLM's options for the workers of each role, as flags of vLLM. Raises ConfigurationError."""
    if settings.colocated:
        refuse(settings, PHASE_ENGINE_ARGS, "is for a service with separate phases: with --colocated use --engine-args")
    # One slot stays empty: vLLM's CPU kernels use the last slot for requests without adapter.
    lora = ("--enable-lora", f"--max-loras={len(settings.lora_modules) + 1}") if settings.lora_modules else ()
    phases = {Role.PREFILL: "prefill_engine_args", Role.DECODE: "decode_engine_args", Role.MIXED: ""}
    return {role: (*lora, *_vllm_flags(settings, f"engine_args {name}")) for role, name in phases.items()}


def lora_adapters(settings: ServeSettings) -> dict[str, str]:
    """Return the directories of LoRA adapters by name. Raises ConfigurationError for others."""
    adapters: dict[str, str] = {}
    for text in settings.lora_modules:
        name, _, path = text.partition("=")
        if not name or name in adapters or not (Path(path) / "adapter_config.json").is_file():
            raise ConfigurationError(f"--lora-modules {text} is not a new NAME=DIR with an adapter_config.json in DIR")
        adapters[name] = str(Path(path).absolute())
    return adapters


def _vllm_flags(settings: ServeSettings, names: str) -> Iterator[str]:
    for name, text in ((each, text) for each in names.split() for text in getattr(settings, each)):
        for each in _read(flag_name(name), text):
            option = each.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")
            if each.startswith("--") and option in flags_of(EngineSettings) and getattr(settings, option) is not None:
                raise ConfigurationError(f"{flag_name(name)} sets {option}, as {flag_name(option)} does: give one")
            yield each


def _read(flag: str, text: str) -> list[str]:
    given = parse_yaml(flag, text, text) if text.lstrip()[:1] in {"{", "["} else read_yaml(flag, Path(text))
    try:
        if isinstance(given, list):  # of vLLM's flags
            return msgspec.convert(given, list[str])
        options = msgspec.convert(given, dict[str, object])
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{flag} {text} is not a mapping of options: {error}") from error
    return [each for name, value in options.items() for each in _as_flags(flag_name(name), value)]


def _as_flags(option: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [option if value else f"--no-{option[2:]}"]
    values = value if isinstance(value, list) else [value]
    texts = [msgspec.json.encode(each).decode() if isinstance(each, dict | list) else str(each) for each in values]
    return [option, *texts] if isinstance(value, list) else [f"{option}={texts[0]}"]
