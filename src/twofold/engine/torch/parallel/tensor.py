"""Tensor parallelism (Megatron-LM): each rank computes with its heads, and its share of the feed-forward layers.

Which matrix is cut by columns and which by rows is transformers' own plan for the model, and so is what is done with
their inputs and outputs.
"""

import re

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from twofold.engine.torch.parallel.pipeline import Elsewhere

try:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism
except ImportError:  # its place in earlier releases was another, and what it took as well
    apply_tensor_parallelism = None

# Of models that transformers has no plan for: by rule, relative to a layer.
_OPT_LAYER = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.out_proj": "rowwise",
    "fc1": "colwise",
    "fc2": "rowwise",
}
_OWN_PLANS = {"opt": {f"model.decoder.layers.*.{name}": style for name, style in _OPT_LAYER.items()}}


def tensor_plan(model: PreTrainedModel) -> dict[str, str]:
    """Style by rule, as in model.layers.*.mlp.up_proj: colwise; empty where none divides the heads.

    Embeddings stay whole: a look-up is cheap, and adding up the ranks' parts of it is not.
    """
    if apply_tensor_parallelism is None:
        return {}
    plan = _OWN_PLANS.get(model.config.model_type) or model.tp_plan or {}
    # Some plans divide experts or the vocabulary only: every rank would then hold the KV of all heads.
    if not any(rule.endswith(".k_proj") and style == "colwise" for rule, style in plan.items()):
        return {}
    return {rule: style for rule, style in plan.items() if not style.startswith("embedding_")}


def keep_shard(model: PreTrainedModel, shards: DeviceMesh) -> None:
    """Cut the weights of `model` down to what this rank of `shards` computes with, in place."""
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):  # it may be the embedding as well, which stays whole
        head.weight = nn.Parameter(head.weight.detach(), requires_grad=False)
    apply_tensor_parallelism(model, shards, _by_name(model, tensor_plan(model)))
    for module in model.modules():
        _take_local(module)
        if model.config.model_type == "opt" and hasattr(module, "num_heads"):
            module.num_heads //= shards.size()  # others find out from the shape of their projections


def _by_name(model: PreTrainedModel, plan: dict[str, str]) -> dict[str, str]:
    """The style of each parameter, and after that of its module, by their full names."""
    named = {}
    for module_name, module in model.named_modules():
        if isinstance(module, Elsewhere):
            continue
        style = plan.get(_rule(module_name))
        for parameter, _ in module.named_parameters(recurse=False):
            full_name = f"{module_name}.{parameter}".removeprefix(".")
            if found := plan.get(_rule(full_name), style):
                named[full_name] = found
        if style is not None:
            named[module_name] = style
    return named


def _rule(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _take_local(module: nn.Module) -> None:
    """Plain tensors in place of distributed ones: looking behind those at every call costs more than small products."""
    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, DTensor):
            local: torch.Tensor = parameter.to_local()
            module.register_parameter(name, nn.Parameter(local, requires_grad=False))
