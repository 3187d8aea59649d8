"""vLLM's own options: parsed by vLLM's command-line parser, and refused where a hand-off cannot work with them."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Final, NoReturn

from pydantic import ValidationError
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from twofold.errors import ConfigurationError, ModelError, require

_USUAL: Final = {each.name: each.default for each in fields(EngineArgs)} | {"skip_tokenizer_init": True}
# Options that contradict the service or cannot be handed off, by the reason.
_REASONS: Final = {
    "give the argument of twofold serve instead": "model tokenizer served_model_name reasoning_parser",
    "give --block-size or --enable-prefix-caching, which the gateway uses too": "block_size enable_prefix_caching",
    "give --tp or --pp": "tensor_parallel_size pipeline_parallel_size",
    "give --prefill, --decode or --colocated, whose workers are replicas": "data_parallel_size data_parallel_rank",
    "Twofold's own KV connector carries hand-offs": "kv_transfer_config kv_offloading_size",
    "the worker collects these events itself and reports cached blocks to the router": "kv_events_config",
    "the gateway tokenizes, so workers load no tokenizer": "skip_tokenizer_init",
    "the KV of a hand-off is in one process": "distributed_executor_backend nnodes prefill_context_parallel_size "
    "decode_context_parallel_size",
    "give speculative_config": "spec_method spec_model spec_tokens",
    "a decode worker starts with one token that a prefill worker has computed": "diffusion_config",
    "the service generates text": "runner convert",
    "tokens are sampled by seed and position, not by vLLM, so that replays are exact": "watermark_config logprobs_mode",
}
REFUSED: Final[Mapping[str, str]] = {name: reason for reason, names in _REASONS.items() for name in names.split()}

# Values of these options that work, besides vLLM's defaults.
_ALLOWED: Final = "distributed_executor_backend=uni runner=generate logprobs_mode=raw_logits"
# Both ends of a hand-off must agree on these. A worker with another layout for other reasons cannot register.
_LAYOUT: Final = (
    "dtype kv_cache_dtype kv_cache_dtype_skip_layers max_model_len hf_overrides disable_sliding_window "
    "speculative_config"
)
_DRAFTERS: Final = ("ngram", "draft_model", "eagle")  # tests hand off their drafts
_DRAFTING: Final = {"method", "model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"}


class _OptionParser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        said = " ".join(message.partition("[type=")[0].split())  # pydantic adds lines about the type of the error
        raise ConfigurationError(f"vLLM's options: {said}")


def parse_options(flags: Sequence[str]) -> dict[str, Any]:
    """Return the engine arguments that flags of vLLM's command line set. Raises ConfigurationError."""
    if not flags:
        return {}
    parser = _OptionParser(add_help=False, allow_abbrev=False)
    EngineArgs.add_cli_args(parser)
    for action in parser._actions:  # noqa: SLF001  (argparse has no other way to leave out what is not given)
        action.default = argparse.SUPPRESS
    found: dict[str, Any] = vars(parser.parse_args(list(flags)))
    for name, value in found.items():
        works = name not in REFUSED or value == _USUAL[name] or f"{name}={value}" in _ALLOWED
        require(works, f"vLLM's option {name} cannot be {value!r} in a worker: {REFUSED.get(name)}")
    _check_drafting(found.get("speculative_config") or {})
    both = found.get("speculative_config") and found.get("async_scheduling")
    require(not both, "vLLM's option async_scheduling is not tested with speculative_config in a worker")
    auto = found.get("max_model_len") == -1
    require(not auto, "vLLM's option max_model_len cannot be auto in a worker: all workers need the same")
    return found


def _check_drafting(given: Mapping[str, object]) -> None:
    other, known = ", ".join(given.keys() - _DRAFTING), not given or given.get("method") in _DRAFTERS
    refused = f"vLLM's option speculative_config cannot be {dict(given)!r} in a worker"
    require(known, f"{refused}: hand-offs are tested with the methods {', '.join(_DRAFTERS)} only")
    require(not other, f"{refused}: hand-offs are not tested with {other}")


def check_phases(prefill: Mapping[str, object], decode: Mapping[str, object]) -> None:
    """Raise ConfigurationError if prefill and decode workers would have KV caches of different layouts."""
    for name in _LAYOUT.split():
        same = prefill.get(name, _USUAL[name]) == decode.get(name, _USUAL[name])
        require(same, f"vLLM's option {name} differs between prefill and decode workers, which need one KV layout")


@contextmanager
def model_errors(model: str) -> Iterator[None]:
    """Raise errors of vLLM about a model and its options as ModelError, with one sentence."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        reason = reason.strip().removeprefix("Value error, ").splitlines()[0].split(". ")[0]
        raise ModelError(f"{model}: vLLM cannot serve it: {reason}") from error
