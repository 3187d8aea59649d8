"""Model dimensions and parameter counts from a Hugging Face config.json. The counts equal those of Transformers."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from twofold.errors import ModelError


class ConfigJson:
    """A parsed Hugging Face config.json, whose fields have different names in different model families."""

    def __init__(self, directory: Path, part: str = "") -> None:
        """Read config.json in `directory`. Raises ModelError if it is missing or not a JSON object.

        Fields in the table `part`, if the file has it, replace those of the whole model.
        """
        self.path = directory / "config.json"
        try:
            self._raw = msgspec.json.decode(self.path.read_bytes(), type=dict[str, object])
        except FileNotFoundError as error:
            raise ModelError(f"{directory} has no config.json, so it is not a model directory") from error
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read: {error.strerror}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ModelError(f"{self.path} is not a JSON object") from error
        self._raw |= self.table(part) or {}

    def error(self, reason: str) -> ModelError:
        return ModelError(f"{self.path}: {reason}")

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the first field in `names` that is set, else `default`. Raises ModelError if no field is set
        and `default` is None, or if the field is not an integer ≥ 1.
        """
        value = self.optional_number(*names)
        if value is None and default is None:
            raise self.error(f"field {names[0]} is missing")
        return value if value is not None else default or 0

    def optional_number(self, *names: str) -> int | None:
        """Return the first field in `names` that is set, if any. Raises ModelError unless it is an integer ≥ 1."""
        for name in names:
            value = self._raw.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise self.error(f"field {name} must be a whole number of at least 1, not {value!r}")
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
        """Return the integers in a list field, or an empty list if the field is missing."""
        value = self._raw.get(name)
        return [each for each in value if isinstance(each, int)] if isinstance(value, list) else []

    def table(self, name: str) -> dict[str, object] | None:
        value = self._raw.get(name)
        return {str(key): each for key, each in value.items()} if isinstance(value, dict) else None


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions and parameter counts of a model. The fields are named as in `twofold.hardware.specs.Model`."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: int
    active_parameters: int
    max_context: int | None
    kv_latent_dims: int | None = None
    expert_parameters: int = 0


def gpt2(config: ConfigJson) -> Architecture:
    """Return the dimensions and parameter counts of a GPT-2 model."""
    hidden = config.number("n_embd", "hidden_size")
    positions = config.number("n_positions", "max_position_embeddings", default=1024)
    inner = config.number("n_inner", default=4 * hidden)
    outside = (config.number("vocab_size") + positions) * hidden + 2 * hidden  # output tied to the embedding
    return _multi_head(config, hidden, inner, outside, positions)


def bloom(config: ConfigJson) -> Architecture:
    """Return the dimensions and parameter counts of a BLOOM model."""
    hidden = config.number("hidden_size", "n_embed")
    # ALiBi instead of positions, a norm after the embedding, output tied to the embedding.
    outside = config.number("vocab_size") * hidden + 4 * hidden
    return _multi_head(config, hidden, 4 * hidden, outside, config.optional_number("seq_length"))


def opt(config: ConfigJson) -> Architecture:
    """Return the dimensions and parameter counts of an OPT model."""
    hidden = config.number("hidden_size")
    width = config.number("word_embed_proj_dim", default=hidden)
    positions = config.number("max_position_embeddings")
    outside = config.number("vocab_size") * width + (positions + 2) * hidden
    outside += 2 * width * hidden if width != hidden else 0  # projections of the smaller embedding of opt-350m
    outside += 2 * hidden if config.flag("do_layer_norm_before", default=True) else 0
    return _multi_head(config, hidden, config.number("ffn_dim"), outside, positions)


def llama(config: ConfigJson) -> Architecture:
    """Return the dimensions and parameter counts of a Llama-like model, such as Mistral, Qwen or Gemma 2."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    kv_heads = config.number("num_key_value_heads", default=heads)
    kind = config.text("model_type", default="")
    head_dim = config.number("head_dim", default=_HEAD_DIMS.get(kind) or hidden // heads)
    queries, keys = heads * head_dim, kv_heads * head_dim
    layer = 2 * hidden * queries + 2 * hidden * keys
    layer += (4 if kind == "gemma2" else 2) * hidden
    layer += 2 * head_dim if kind.startswith("qwen3") else 0
    if config.flag("attention_bias", default=kind == "qwen2"):
        layer += queries + 2 * keys + (0 if kind == "qwen2" else hidden)
    return _gated(config, layer, heads, kv_heads, head_dim, tied=kind == "gemma2")


def deepseek(config: ConfigJson) -> Architecture:
    """Return the dimensions and parameter counts of a DeepSeek V2 or V3 model (arXiv 2405.04434, section 2.1)."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    latent, rope = config.number("kv_lora_rank"), config.number("qk_rope_head_dim")
    plain, value = config.number("qk_nope_head_dim"), config.number("v_head_dim")
    rank = config.optional_number("q_lora_rank")
    queries = heads * (plain + rope)
    layer = hidden * queries if rank is None else hidden * rank + rank + rank * queries
    layer += hidden * (latent + rope) + latent + latent * heads * (plain + value) + heads * value * hidden
    layer += 2 * hidden
    kv_heads = config.number("num_key_value_heads", default=heads)
    return _gated(config, layer, heads, kv_heads, value, latent_dims=latent + rope)


def _gated(
    config: ConfigJson,
    layer: int,  # parameters of a layer without its feed-forward network and experts
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    tied: bool = False,
    latent_dims: int | None = None,
) -> Architecture:
    hidden, layers = config.number("hidden_size"), config.number("num_hidden_layers")
    embeddings = 1 if config.flag("tie_word_embeddings", default=tied) else 2
    rest = layers * layer + config.number("vocab_size") * hidden * embeddings + hidden
    always, experts, chosen = _feed_forward(config, hidden, layers)
    return Architecture(
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        parameters=rest + always + experts,
        active_parameters=rest + always + chosen,
        max_context=config.optional_number("max_position_embeddings"),
        kv_latent_dims=latent_dims,
        expert_parameters=experts,
    )


def _multi_head(config: ConfigJson, hidden: int, inner: int, outside: int, max_context: int | None) -> Architecture:
    # `outside` is the number of parameters outside the layers.
    layers = config.number("num_hidden_layers", "n_layer")
    heads = config.number("num_attention_heads", "n_head")
    layer = 4 * hidden * hidden + 4 * hidden + 2 * hidden * inner + inner + hidden + 4 * hidden
    return Architecture(
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        parameters=layers * layer + outside,
        active_parameters=layers * layer + outside,
        max_context=max_context,
    )


def _feed_forward(config: ConfigJson, hidden: int, layers: int) -> tuple[int, int, int]:
    """Return the parameters that compute every token, those of all other experts, and those of the experts chosen."""
    inner = config.number("intermediate_size")
    gated = 3 * hidden * inner
    if config.flag("mlp_bias", default=False):
        gated += 2 * inner + hidden
    experts = config.optional_number("num_local_experts", "num_experts", "n_routed_experts")
    if experts is None:
        return layers * gated, 0, 0
    expert = 3 * hidden * config.number("moe_intermediate_size", default=inner)
    chosen = min(config.number("num_experts_per_tok"), experts)
    shared = config.optional_number("n_shared_experts") or 0
    sparse = sum(_is_sparse(config, index) for index in range(layers))
    always = sparse * (hidden * experts + shared * expert) + (layers - sparse) * gated
    return always, sparse * experts * expert, sparse * chosen * expert


def _is_sparse(config: ConfigJson, index: int) -> bool:
    """Return whether a layer has experts instead of one feed-forward network."""
    if index < (config.optional_number("first_k_dense_replace") or 0) or index in config.numbers("mlp_only_layers"):
        return False
    return (index + 1) % config.number("decoder_sparse_step", default=1) == 0 and (
        index % config.number("moe_layer_freq", default=1) == 0
    )


# Family defaults of values that config.json may omit.
_HEAD_DIMS = {"gemma2": 256, "qwen3": 128}

ARCHITECTURES: dict[str, Callable[[ConfigJson], Architecture]] = {
    "gpt2": gpt2,
    "bloom": bloom,
    "opt": opt,
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2"), llama),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), deepseek),
}
