"""Operator times of engines with experts on several machines: their ranks exchange tokens.

    python bench/silicon/all_to_all.py

EngineHandle.compile of aiconfigurator-core sums times of kernels that gather the tokens of all ranks. The package has
measured the all-to-all kernels of these engines, too, and this module compiles engines with them. As a program, it
prints the decode iterations of both beside the TPOT of measured deployments of DeepSeek-V3 over 32 ranks of GB200.
"""

import re
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
from rows import silicon_rows

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.performance.aiconfigurator import EngineLayout, OperatorTables, operator_tables

_DEEP_EP = {"context": "deepep_ht", "generation": "deepep_ll"}
_NVLINK = {"context": "nvlink_two_sided", "generation": "nvlink_two_sided"}
_KERNELS = {"vllm": _DEEP_EP, "sglang": _DEEP_EP, "trtllm": _NVLINK}
_EXPERTS = re.compile("moe|router|shared|gate|ffn2")  # in names of operators
_TRTLLM_LEAST = 9  # ranks: TensorRT-LLM gathers the tokens of no more ranks than a token has experts


def exchanges_tokens(layout: EngineLayout) -> bool:
    """Whether ranks with requests of their own share experts that are on several machines."""
    ranks = layout.attention_data_parallel
    least = _TRTLLM_LEAST if layout.backend == "trtllm" else 2
    return ranks == layout.expert_parallel >= least and ranks > _machine_width(layout.system)


@cache
def all_to_all_tables(layout: EngineLayout) -> OperatorTables | None:
    """Return the tables of an engine with all-to-all kernels; None if one of its operators was not measured."""
    for kv in dict.fromkeys((layout.attention, None)):
        with suppress(ConfigurationError):
            return OperatorTables(layout, _compile(layout, kv))
    return None


def _compile(layout: EngineLayout, kv: str | None) -> Any:  # noqa: ANN401  (the package has no types)
    from aiconfigurator_core import engine_spec_bincode_from_json  # noqa: PLC0415  (an extra, and slow to import)
    from aiconfigurator_core.sdk.engine import EngineHandle, build_engine_spec_json  # noqa: PLC0415
    from aiconfigurator_core.sdk.perf_database import get_version_slots  # noqa: PLC0415

    spread, plain = _model(layout, kv, _KERNELS[layout.backend]), _model(layout, kv, None)
    # The attention of prompts was measured only with the other kernels.
    spread.context_ops[:] = [
        *(each for each in plain.context_ops if not _of_experts(each)),
        *(each for each in spread.context_ops if _of_experts(each)),
    ]
    spec = build_engine_spec_json(
        spread,
        model_path=layout.model,
        system=layout.system,
        backend=layout.backend,
        backend_version=layout.version or (get_version_slots(layout.system, layout.backend) or {})["current"],
        kv_block_size=None,
        systems_path=None,
        nextn=layout.draft_tokens,
    )
    return EngineHandle(bytes(engine_spec_bincode_from_json(spec)))


def _of_experts(operator: Any) -> bool:  # noqa: ANN401
    return _EXPERTS.search(operator._name) is not None  # noqa: SLF001  (it has no other)


def _model(layout: EngineLayout, kv: str | None, kernels: dict[str, str] | None) -> Any:  # noqa: ANN401
    from aiconfigurator_core.sdk.config_builders import apply_nextn, build_model_config  # noqa: PLC0415
    from aiconfigurator_core.sdk.models import get_model  # noqa: PLC0415

    config = build_model_config(
        tp_size=layout.tensor_parallel,
        pp_size=layout.pipeline_parallel,
        attention_dp_size=layout.attention_data_parallel,
        moe_tp_size=1,
        moe_ep_size=layout.expert_parallel,
        gemm_quant_mode=layout.gemm,
        moe_quant_mode=layout.experts,
        fmha_quant_mode="bfloat16",
        kvcache_quant_mode=kv,
    )
    config.moe_comm_backend = kernels
    config.num_gpus_per_node, config.system = _machine_width(layout.system), layout.system
    apply_nextn(config, layout.draft_tokens)
    return get_model(layout.model, config, layout.backend)


@cache
def _machine_width(system: str) -> int:
    """Return the accelerators of one machine of a system."""
    described = files("aiconfigurator_core").joinpath(f"systems/{system}.yaml").read_bytes()
    return int(msgspec.yaml.decode(described)["node"]["num_gpus_per_node"])


def main() -> None:
    layout = EngineLayout(
        model="deepseek-ai/DeepSeek-V3",
        system="gb200",
        backend="sglang",
        attention_data_parallel=32,
        expert_tensor_parallel=1,
        expert_parallel=32,
        gemm="fp8",
        experts="fp8_block",
    )
    found = {"tokens gathered": operator_tables(layout), "all-to-all": all_to_all_tables(layout)}
    alike = (layout.system, layout.backend, "fp8", 1024, 1024)
    for row in silicon_rows():
        engine = (row.system, row.backend, row.precision, row.isl, row.osl)
        if row.mode == "disagg" and engine == alike and row.decode_moe_ep_size == layout.expert_parallel:
            sequences = row.sequences(Role.DECODE)
            context = sequences * (row.isl + row.osl // 2)
            costs = {name: tables.decode_cost(sequences) for name, tables in found.items() if tables is not None}
            times = {name: cost.base_s + cost.context_s * context for name, cost in costs.items()}
            told = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in times.items())
            print(f"{sequences} sequences of a rank: measured {row.silicon_tpot_ms:.1f} ms, {told}")


if __name__ == "__main__":
    main()
