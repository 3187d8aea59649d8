"""How InferenceX deployed its servers, which the silicon sample tells only in part.

InferenceX lists its deployments in `.github/configs/nvidia-master.yaml` of github.com/SemiAnalysisAI/InferenceX. The
file changes with each benchmark, so it is read from a clone, as it was when a row was measured.
"""

import re
import subprocess
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rows import SiliconRow

from twofold.errors import ConfigurationError
from twofold.instance import Role

FILE = ".github/configs/nvidia-master.yaml"
_MODELS = {
    "deepseek-ai/DeepSeek-R1": "dsr1",
    "deepseek-ai/DeepSeek-V3": "dsr1",
    "moonshotai/Kimi-K2.5": "kimik2.5",
    "MiniMaxAI/MiniMax-M2.5": "minimaxm2.5",
    "Qwen/Qwen3.5-397B-A17B": "qwen3.5",
    "openai/gpt-oss-120b": "gptoss",
    "zhipuai/GLM-5": "glm5",
}
_ENGINES = {"trt": "trtllm", "sglang": "sglang", "vllm": "vllm"}
_LISTED_LATER = timedelta(days=30)  # a deployment may be measured from a branch before the file lists it
_DEPTH = re.compile(r"mtp(?:_size=)?(\d)", re.IGNORECASE)
_BATCH = re.compile(r"(?:_batch|DECODE_MAX_BATCH_SIZE=)(\d+)")
_DEFAULT_DEPTH = 3  # draft tokens of an iteration with attention in one group of accelerators
_Json = dict[str, Any]


class Part(NamedTuple):
    """The servers of one role. With attention data parallelism, each accelerator has requests of its own."""

    workers: int
    width: int  # accelerators
    expert: int
    attention_data: bool


class Setting(NamedTuple):
    """Options of a deployment."""

    draft_tokens: int = 0  # of each iteration
    batch: int | None = None  # most sequences of one rank that decodes; None: unknown
    parts: tuple[Part, ...] = ()  # of each role; empty: unknown


class Deployments:
    """Deployments of a clone of InferenceX's repository."""

    def __init__(self, clone: Path) -> None:
        """Read the history of the file. Raises ConfigurationError if `clone` is not a clone."""
        self._clone = clone
        try:
            history = self._git("log", "--format=%H %cs", "--", FILE).decode().split()
        except (OSError, subprocess.CalledProcessError) as error:
            raise ConfigurationError(f"{clone} is not a clone of github.com/SemiAnalysisAI/InferenceX") from error
        self._versions = list(zip(history[::2], map(date.fromisoformat, history[1::2]), strict=True))
        self._listed = cache(self._read)

    def setting(self, row: SiliconRow, *, faster: bool) -> Setting:
        """Return the options of a row's deployment. `faster`: the sample has it with a much longer TPOT, too."""
        known = self._settings(row)
        plain = [each for each in known if not each.draft_tokens]
        if plain and not faster:
            return plain[0]
        return max(known, key=lambda each: each.draft_tokens, default=Setting())

    def completed(self, row: SiliconRow) -> SiliconRow:
        """Return a row with its numbers of workers, if it lacks them and the file has just one such deployment."""
        if row.complete:
            return row
        widths = [_part(row, role).width for role in row.roles]  # such rows have the accelerators of a worker
        parts = {each.parts for each in self._alike(row, widths, lambda part: part.width)}
        return row.deployed(*parts.pop()) if len(parts) == 1 else row

    def _settings(self, row: SiliconRow) -> list[Setting]:
        """Return the options of all deployments that a row may be of, by the likeliest reading that finds one."""
        parts = [_part(row, role) for role in row.roles]
        # The sample lacks the attention's parallelism of some rows.
        return self._alike(row, parts, lambda part: part) or self._alike(
            row, [part[:3] for part in parts], lambda part: part[:3]
        )

    def _alike(self, row: SiliconRow, wanted: list[Any], of: Callable[[Part], Any]) -> list[Setting]:
        """Return the options of the listed deployments that have a row's engine and load.

        `of` maps each of their parts to the value that `wanted` has for it.
        """
        engine = (_MODELS.get(row.model_path), row.precision, row.system.removesuffix("_sxm"), row.backend)
        # Some recipes count the requests of one worker.
        for day, whole in product((row.measured, row.measured + _LISTED_LATER), (True, False)):
            found = [
                each.setting
                for each in self._listed(self._version(day))
                if (each.engine, each.lengths) == (engine, (row.isl, row.osl))
                and [of(part) for part in each.setting.parts] == wanted
                and row.concurrency
                in {count * (1 if whole else each.setting.parts[-1].workers) for count in each.concurrencies}
            ]
            if found:
                return found
        return []

    def _version(self, day: date) -> str:
        return next((commit for commit, written in self._versions if written <= day), self._versions[-1][0])

    def _read(self, commit: str) -> list["_Listed"]:
        configs = msgspec.yaml.decode(self._git("show", f"{commit}:{FILE}")).values()
        return [each for config in configs for each in _deployments(config)]

    def _git(self, *command: str) -> bytes:
        return subprocess.run(["git", "-C", self._clone, *command], check=True, capture_output=True).stdout


class _Listed(NamedTuple):
    engine: tuple[str | None, ...]
    lengths: tuple[int, int]
    concurrencies: list[int]
    setting: Setting


def _part(row: SiliconRow, role: Role) -> Part:
    sizes = row.parallelism(role)
    return Part(row.ranks(role) // sizes.data, sizes.tensor * sizes.data, sizes.expert, sizes.data > 1)


def _deployments(config: _Json) -> Iterator[_Listed]:
    """Yield all deployments of one entry of the file."""
    framework = config["framework"].removeprefix("dynamo-").partition("-")[0]
    runner = config["runner"].partition("-")[0]
    engine = (config["model-prefix"], config["precision"], runner, _ENGINES.get(framework))
    lengths_of = config.get("seq-len-configs") or config.get("scenarios", {}).get("fixed-seq-len", ())
    for lengths in lengths_of:
        for each in lengths["search-space"]:
            workers = [each["prefill"], each["decode"]] if "prefill" in each else [each]
            parts = tuple(
                Part(part.get("num-worker", 1), part["tp"], part.get("ep", 1), bool(part.get("dp-attn")))
                for part in workers
            )
            options = " ".join(str(option) for part in workers for option in part.get("additional-settings", ()))
            batch = _BATCH.search(options)
            setting = Setting(_depth(each, options), int(batch[1]) if batch else None, parts)
            yield _Listed(engine, (lengths["isl"], lengths["osl"]), list(_concurrencies(each)), setting)


def _concurrencies(each: _Json) -> Iterator[int]:
    if "conc-list" in each:
        yield from each["conc-list"]
        return
    concurrency = each["conc-start"]
    while concurrency <= each["conc-end"]:
        yield concurrency
        concurrency *= 2


def _depth(each: _Json, options: str) -> int:
    if each.get("spec-decoding", "none") == "none":
        return 0
    named = _DEPTH.search(options)
    if named:
        return int(named[1])
    return 1 if each.get("dp-attn") else _DEFAULT_DEPTH
