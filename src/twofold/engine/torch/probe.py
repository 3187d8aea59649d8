"""Inspects a model's attention in a tiny forward pass, and rejects unsupported models."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from twofold.engine.base import LayerShape
from twofold.engine.model_config import context_length
from twofold.engine.torch.batch import PAGED, paged_attention
from twofold.engine.torch.kernels import AttentionScoring, attend, attention_mask
from twofold.errors import ModelError

# (batch, head, query position, key position) → whether the query attends to the key; index tensors of one shape.
MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def read_window(visible: MaskRule, max_model_len: int, refuse: Callable[[str], ModelError]) -> int | None:
    """Return the window of a causal mask in tokens, or None for full attention. Raises ModelError for other masks."""
    last = max_model_len - 1
    try:
        window = int(_row(visible, last, max_model_len).sum())
        samples = {0, 1, last // 3, last // 2, last - 1, last, window - 1, window, window + 1}
        for query in sorted(q for q in samples if 0 <= q <= last):
            keys = torch.arange(max_model_len)
            expected = (keys <= query) & (keys > query - window)
            if not torch.equal(_row(visible, query, max_model_len), expected):
                raise refuse("its attention mask is neither causal nor a sliding window")
    except (IndexError, RuntimeError) as error:  # the rule needs the tensors of one batch
        raise refuse(f"the rule of its attention mask cannot be read ({error})") from error
    return None if window >= max_model_len else window


def _row(visible: MaskRule, query: int, keys: int) -> Tensor:
    zeros = torch.zeros(keys, dtype=torch.long)
    return visible(zeros, zeros, torch.full((keys,), query), torch.arange(keys)).expand(keys)


_PROBE = "twofold_probe"
_TOKENS = 8
# Attention arguments that are supported, replaced by masks, or without effect on paged attention.
_KNOWN = frozenset({"scaling", "softcap", "s_aux", "sliding_window", "position_ids", "use_cache"})


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """KV shape and sliding window (None: full attention) of one attention layer."""

    shape: LayerShape
    window: int | None


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """The attention layers of a model, the dtype of the KV, and the context length."""

    layers: list[ProbedLayer]
    dtype: torch.dtype
    max_model_len: int


@dataclass(slots=True)
class _Probe:
    """Collects a model's attention layers during a forward pass."""

    name: str
    max_model_len: int
    layers: dict[int, ProbedLayer] = field(default_factory=dict)
    dtypes: set[torch.dtype] = field(default_factory=set)
    calls: int = 0

    def refuse(self, reason: str) -> ModelError:
        return _refusal(self.name, reason)


class _NotHandedDownError(Exception):
    """The model does not pass extra arguments of `forward` on to its attention layers."""


def probe_layers(model: PreTrainedModel, name: str) -> ProbedModel:
    """Switch a model to paged attention, and return its attention layers. Raises ModelError if it is unsupported."""
    _check_kind(model, name)
    text = model.config.get_text_config(decoder=True)
    probe = _Probe(name, context_length(text, name))
    AttentionInterface.register(_PROBE, _probe_attention)
    AttentionMaskInterface.register(_PROBE, _probe_mask)
    _run(model, probe)
    AttentionInterface.register(PAGED, paged_attention)
    model.set_attn_implementation(PAGED)
    return _all_layers(probe, text.num_hidden_layers)


def _check_kind(model: PreTrainedModel, name: str) -> None:
    """Raise ModelError if the model keeps recurrent state or takes no position ids."""
    if model._is_stateful:  # noqa: SLF001  (transformers has no public name for it)
        raise _refusal(name, "some of its layers keep state other than a KV cache (state space, linear attention)")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise _refusal(name, "its forward has no position_ids")


def _refusal(name: str, reason: str) -> ModelError:
    return ModelError(f"{name} cannot be served: {reason}")


def _run(model: PreTrainedModel, probe: _Probe) -> None:
    ids = torch.arange(min(_TOKENS, probe.max_model_len)).unsqueeze(0)
    try:
        model.set_attn_implementation(_PROBE)
        with torch.inference_mode(), _without_cuda_graphs():
            model(input_ids=ids, position_ids=ids, use_cache=False, twofold_probe=probe)
    except ModelError:
        raise
    except _NotHandedDownError as error:
        raise probe.refuse("its forward does not pass its arguments to its attention") from error
    except Exception as error:  # any error of the model's own code
        reason = "".join(str(error).splitlines()[:1])
        raise probe.refuse(f"its forward pass failed ({type(error).__name__}: {reason})") from error


@contextmanager
def _without_cuda_graphs() -> Iterator[None]:
    """Make `torch.cuda.is_current_stream_capturing` return False within a `with` block."""
    asked = torch.cuda.is_current_stream_capturing
    # The check would initialize CUDA, and then the process could not fork.
    torch.cuda.is_current_stream_capturing = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked


def _all_layers(probe: _Probe, expected: int) -> ProbedModel:
    if probe.calls == 0:
        raise probe.refuse("it does not use transformers' attention interface")
    if probe.calls != expected or sorted(probe.layers) != list(range(expected)):
        raise probe.refuse(f"it has {expected} layers and calls attention {probe.calls} times")
    if len(probe.dtypes) > 1:
        raise probe.refuse(f"its keys and values have several dtypes ({', '.join(map(str, probe.dtypes))})")
    return ProbedModel([probe.layers[layer] for layer in range(expected)], probe.dtypes.pop(), probe.max_model_len)


def _probe_mask(
    q_length: int, kv_length: int, mask_function: MaskRule, device: torch.device, **_rest: object
) -> Tensor:
    """Return a dummy mask, and store the model's mask function as an attribute of the mask."""
    carrier = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
    carrier.twofold_visible = mask_function  # type: ignore[attr-defined]
    return carrier


def _probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    twofold_probe: _Probe | None = None,
    **arguments: object,
) -> tuple[Tensor, None]:
    probe = twofold_probe
    if probe is None:
        raise _NotHandedDownError
    probe.calls += 1
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise probe.refuse("its attention layers have no layer_idx")
    shape = LayerShape(kv_heads=key.shape[1], key_dim=key.shape[3], value_dim=value.shape[3])
    _check_arguments(probe, module, arguments)
    window = _window(probe, attention_mask)
    probe.dtypes |= {key.dtype, value.dtype}
    probe.layers[layer] = ProbedLayer(shape, window)
    return _compare_with_eager(probe, module, (query, key, value), arguments, window), None


def _check_arguments(probe: _Probe, module: nn.Module, arguments: dict[str, object]) -> None:
    causal = arguments.pop("is_causal", None)
    if causal is False or (causal is None and getattr(module, "is_causal", True) is False):
        raise probe.refuse("its attention is not causal")
    if arguments.pop("dropout", 0.0):
        raise probe.refuse("it uses dropout in eval mode")
    unknown = [key for key, given in arguments.items() if key not in _KNOWN and given not in (None, False)]
    if unknown:
        raise probe.refuse(f"its attention takes {', '.join(sorted(unknown))}, which is not supported")


def _window(probe: _Probe, mask: Tensor | None) -> int | None:
    """Return the sliding window of the model's mask in tokens, or None for full attention."""
    if mask is None:
        return None
    visible = getattr(mask, "twofold_visible", None)
    if visible is None:
        raise probe.refuse("it modifies its attention masks")
    return read_window(visible, probe.max_model_len, probe.refuse)


def _compare_with_eager(
    probe: _Probe,
    module: nn.Module,
    states: tuple[Tensor, Tensor, Tensor],
    arguments: dict[str, object],
    window: int | None,
) -> Tensor:
    """Compute attention with the engine. Raises ModelError if the result differs from transformers' result."""
    query, key, value = (state.float() for state in states)
    scoring = AttentionScoring(arguments.get("scaling"), arguments.get("softcap"), arguments.get("s_aux"))  # type: ignore[arg-type]
    own = range(query.shape[2])
    mask = attention_mask(own, own, window, query)
    ours = attend(query, key, value, scoring, mask).transpose(1, 2)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is not None:
        theirs = eager(module, query, key, value, mask, **arguments)[0]
        if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max())):
            raise probe.refuse(f"{type(module).__name__} has an unsupported kind of attention")
    return ours.to(states[2].dtype)
