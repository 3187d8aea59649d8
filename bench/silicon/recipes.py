"""Options with which the benchmarks of the silicon sample start their servers.

Most rows of the sample are runs of InferenceX (github.com/SemiAnalysisAI/InferenceX, directory `benchmarks`), which has
a script for each engine, model, precision and system. For other sources, the options are the engine's defaults.
"""

import msgspec
from rows import BLACKWELL, GPT_OSS, SiliconRow

_DEEPSEEK = ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3")
_LLAMA = "meta-llama/Llama-3.1-70B"
_QWEN = "Qwen/Qwen3.5-397B-A17B"
_GLM = "zhipuai/GLM-5"


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts wait beside decodes for at most `iterations`, unless they fill a share of the token budget."""

    iterations: int
    share: float


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a server."""

    max_num_batched_tokens: int
    max_num_seqs: int | None = None
    kv: str | None = None  # precision of the KV cache; None: that of the checkpoint
    receive_every: int = 1  # decode iterations from one reception of new requests to the next
    wait: Wait | None = None


def recipe(row: SiliconRow) -> Recipe:
    """Return the options with which the server of a row was started."""
    return {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}[row.backend](row)


def _vllm(row: SiliconRow) -> Recipe:
    fp8 = row.system in BLACKWELL and row.model_path in (_LLAMA, GPT_OSS)
    return Recipe(max_num_batched_tokens=8192, kv="fp8" if fp8 else None)


def _sglang(row: SiliconRow) -> Recipe:
    blackwell, tokens, sequences = row.system in BLACKWELL, 16_384, None
    if not row.of_inferencex or row.mode == "disagg":
        return Recipe(max_num_batched_tokens=tokens, kv="fp8" if row.of_inferencex and blackwell else None)
    if row.model_path in _DEEPSEEK and row.precision == "fp8":
        tokens, sequences = 32_768, 128 if blackwell else 256
        if not blackwell and row.isl == row.osl:
            sequences = 512
    elif row.model_path == _QWEN:
        tokens, sequences = 32_768 if blackwell else 16_384, 128
        if row.precision == "fp4":
            sequences = max(sequences, row.concurrency or 0)
    elif row.model_path == _GLM and blackwell:
        tokens = 32_768
    receives = blackwell and row.model_path != _GLM  # others receive new requests before each iteration
    return Recipe(
        max_num_batched_tokens=tokens,
        max_num_seqs=sequences,
        kv="fp8" if blackwell or row.model_path == _QWEN else None,
        receive_every=(30 if (row.concurrency or 0) >= 16 else 10) if receives else 1,
    )


def _trtllm(row: SiliconRow) -> Recipe:
    tokens, kv, wait, short = 8192, None, None, (row.isl, row.osl) == (1024, 1024)
    if row.of_inferencex and row.model_path in _DEEPSEEK:
        tokens, kv = max(8192, row.sequences(row.roles[0]) + row.isl + 64), "fp8"
        if short and row.system == "b200_sxm" and row.precision == "fp8" and (row.concurrency or 0) >= 64:
            wait = Wait(iterations=40, share=0.8)
    elif row.of_inferencex and row.model_path == GPT_OSS:
        tokens, kv = 20_000, "fp8" if row.system in BLACKWELL else None
    elif row.of_inferencex and row.model_path == _LLAMA:
        tokens, kv = 16_384 if row.precision == "fp8" else row.isl + row.osl + 200, "fp8"
        if short and (row.tp_size or 1) < 8:
            wait = Wait(iterations=20, share=0.9)
    return Recipe(max_num_batched_tokens=tokens, kv=kv, wait=wait)
