"""Deployments of InferenceX with speculative decoding, which the silicon sample has no field for.

InferenceX lists its deployments in `.github/configs/nvidia-master.yaml` of github.com/SemiAnalysisAI/InferenceX.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rows import SiliconRow

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
_DEPTH = re.compile(r"mtp(\d)")
_DEFAULT_DEPTH = 3  # draft tokens of an iteration with attention in one group of accelerators
_Json = dict[str, Any]
_Key = tuple[object, ...]


class Speculation:
    """Draft tokens of each iteration, by deployment and concurrency."""

    def __init__(self, path: Path) -> None:
        """Read the deployments in the file `path`."""
        self._depths = defaultdict[_Key, set[int]](set)
        for config in msgspec.yaml.decode(path.read_bytes()).values():
            for key, depth in _deployments(config):
                self._depths[key].add(depth)

    def depth(self, row: SiliconRow, *, faster: bool) -> int:
        """Return the number of draft tokens. `faster`: the sample has the same deployment with a much longer TPOT."""
        known = self._depths.get(_key_of(row), set())
        deepest = max(known, default=0)
        return deepest if faster or 0 not in known else 0


def _key_of(row: SiliconRow) -> _Key:
    parts = []
    for role in row.roles:
        sizes = row.parallelism(role)
        workers = row.ranks(role) // sizes.data
        parts.append((workers, sizes.tensor * sizes.data, sizes.expert, sizes.data > 1))
    system = row.system.removesuffix("_sxm")
    engine = (_MODELS.get(row.model_path), row.precision, system, row.backend)
    return (*engine, row.isl, row.osl, row.concurrency, *parts)


def _deployments(config: _Json) -> Iterator[tuple[_Key, int]]:
    """Yield all deployments of one entry of the file."""
    framework = config["framework"].removeprefix("dynamo-").partition("-")[0]
    engine = (config["model-prefix"], config["precision"], config["runner"].partition("-")[0], _ENGINES.get(framework))
    for lengths in config.get("seq-len-configs", ()):
        for each in lengths["search-space"]:
            workers = [each["prefill"], each["decode"]] if "prefill" in each else [each]
            parts = [
                (part.get("num-worker", 1), part["tp"], part.get("ep", 1), bool(part.get("dp-attn")))
                for part in workers
            ]
            for concurrency in _concurrencies(each):
                yield (*engine, lengths["isl"], lengths["osl"], concurrency, *parts), _depth(each)


def _concurrencies(each: _Json) -> Iterator[int]:
    if "conc-list" in each:
        yield from each["conc-list"]
        return
    concurrency = each["conc-start"]
    while concurrency <= each["conc-end"]:
        yield concurrency
        concurrency *= 2


def _depth(each: _Json) -> int:
    if each.get("spec-decoding", "none") == "none":
        return 0
    named = _DEPTH.search(str(each.get("prefill", {}).get("additional-settings")))
    if named:
        return int(named[1])
    return 1 if each.get("dp-attn") else _DEFAULT_DEPTH
