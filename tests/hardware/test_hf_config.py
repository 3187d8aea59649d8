"""Model properties read from Hugging Face config.json files, such as parameter counts and weight sizes."""

import json

import pytest

from twofold.errors import ModelError
from twofold.hardware.catalog import load_catalog
from twofold.hardware.hf_config import read_model

HALF = {"torch_dtype": "bfloat16"}


def llama(layers, hidden, heads, kv_heads, inner, vocabulary, context, **more):
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        **HALF,
        **more,
    }


def qwen3(layers, hidden, heads, kv_heads, inner, **more):
    sizes = (layers, hidden, heads, kv_heads, inner, 151_936, 40_960)
    return llama(*sizes, head_dim=128, **{"model_type": "qwen3", **more})


def qwen3_moe(layers, hidden, heads, inner, expert):
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert}
    more = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return qwen3(layers, hidden, heads, 4, inner, model_type="qwen3_moe", **experts, **more)


def opt(layers, hidden, heads, **more):
    return {
        "model_type": "opt",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "vocab_size": 50_272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": hidden,
        "torch_dtype": "float16",
        **more,
    }


BLOOM = {
    "model_type": "bloom",
    "n_layer": 70,
    "hidden_size": 14_336,
    "num_attention_heads": 112,
    "vocab_size": 250_880,
    "seq_length": 2048,
    **HALF,
}
DEEPSEEK_V3 = llama(61, 7168, 128, 128, 18_432, 129_280, 163_840) | {
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "quantization_config": {"quant_method": "fp8"},
}
CONFIGS = {
    "llama2-70b": llama(80, 8192, 64, 8, 28_672, 32_000, 4096),
    "llama-3.1-8b": llama(32, 4096, 32, 8, 14_336, 128_256, 131_072),
    "llama-3.1-70b": llama(80, 8192, 64, 8, 28_672, 128_256, 131_072),
    "llama-3.1-405b": llama(126, 16_384, 128, 8, 53_248, 128_256, 131_072),
    "bloom-176b": BLOOM,
    "opt-1.3b": opt(24, 2048, 32),
    "opt-6.7b": opt(32, 4096, 32),
    "opt-13b": opt(40, 5120, 40),
    "opt-30b": opt(48, 7168, 56),
    "opt-66b": opt(64, 9216, 72),
    "opt-175b": opt(96, 12_288, 96),
    "qwen3-8b": qwen3(36, 4096, 32, 8, 12_288),
    "qwen3-14b": qwen3(40, 5120, 40, 8, 17_408),
    "qwen3-32b": qwen3(64, 5120, 64, 8, 25_600),
    "qwen3-30b-a3b": qwen3_moe(48, 2048, 32, 6144, 768),
    "qwen3-235b-a22b": qwen3_moe(94, 4096, 64, 12_288, 1536),
    "deepseek-v3": DEEPSEEK_V3,
}
# Parameters of other families as counted by Transformers (tied ones once).
GEMMA2_9B = llama(42, 3584, 16, 8, 14_336, 256_000, 8192, model_type="gemma2", head_dim=256)
MIXTRAL = llama(32, 4096, 32, 8, 14_336, 32_000, 32_768, model_type="mixtral")
QWEN2_7B = llama(28, 3584, 28, 4, 18_944, 152_064, 32_768, model_type="qwen2")
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50_257, "n_positions": 1024}
V2_LITE = llama(27, 2048, 16, 16, 10_944, 102_400, 163_840) | {
    **{key: DEEPSEEK_V3[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")},
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}
COUNTS = [
    (GPT2, 124_439_808),
    (GEMMA2_9B, 9_241_705_984),
    (MIXTRAL | {"num_local_experts": 8, "num_experts_per_tok": 2}, 46_702_792_704),
    (QWEN2_7B, 7_615_616_512),
    (V2_LITE, 15_706_484_224),
    (opt(24, 1024, 16, word_embed_proj_dim=512, do_layer_norm_before=False), 331_196_416),
]


@pytest.fixture
def directory(tmp_path):
    """Return a function that writes a config.json into a new directory and returns the directory."""

    def write(config, name="mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        return tmp_path / name

    return write


@pytest.mark.parametrize("name", CONFIGS)
def test_catalog_models_match_their_config_json(directory, name):
    catalog = load_catalog()
    read, known = catalog.model(str(directory(CONFIGS[name], name))), catalog.model(name)
    # The catalog has the weights of these two models from another source.
    apart = {"source", "date"} | ({"weight_bytes"} if name in {"bloom-176b", "deepseek-v3"} else set())
    for field in set(read.__struct_fields__) - apart:
        assert getattr(read, field) == getattr(known, field), field
    assert read.kv_bytes_per_token == known.kv_bytes_per_token


def test_every_catalog_model_is_covered():
    assert set(CONFIGS) == set(load_catalog().models)


@pytest.mark.parametrize(("config", "parameters"), COUNTS)
def test_parameter_counts_match_model_cards(directory, config, parameters):
    assert read_model(directory(config)).parameters == parameters


def test_source_and_dtype_sizes(directory):
    path = directory(CONFIGS["llama-3.1-8b"] | {"torch_dtype": "float32"})
    model = read_model(path)
    assert (model.source, model.name) == (str(path / "config.json"), "mine")
    assert (model.dtype_bytes, model.kv_dtype_bytes) == (4, 4)
    assert model.weight_bytes == 4 * model.parameters
    untyped = {key: value for key, value in CONFIGS["llama-3.1-8b"].items() if key != "torch_dtype"}
    assert read_model(directory(untyped, "untyped")).kv_dtype_bytes == 2


def test_quantized_weight_sizes(directory):
    """The weight size of a quantized model is read from its files, else computed from its bits per weight."""
    four_bits = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    path = directory(CONFIGS["llama-3.1-8b"] | four_bits)
    assert read_model(path).weight_bytes == 8_030_261_248 // 2
    (path / "model-00001-of-00002.safetensors").write_bytes(bytes(1000))
    (path / "model-00002-of-00002.safetensors").write_bytes(bytes(500))
    assert read_model(path).weight_bytes == 1500
    (path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 5.5e9}}')
    model = read_model(path)
    assert (model.weight_bytes, model.dtype_bytes, model.kv_dtype_bytes) == (5_500_000_000, 1, 2)


def test_reads_a_directory_saved_by_transformers(tiny_model_dir):
    for arch in ("llama", "qwen3", "gpt2", "opt", "mixtral", "gemma2"):
        directory = tiny_model_dir(arch)
        files = list(directory.glob("model*.safetensors"))
        model = load_catalog().model(str(directory))
        stored = sum(path.stat().st_size for path in files)
        # The files also have a header, and tied weights are stored once.
        assert 0 <= stored - model.weight_bytes < 0.2 * stored


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "xyz"}, "unknown model_type 'xyz'; choose from bloom, "),
        ({"model_type": "lama"}, "did you mean llama?"),
        ({"model_type": None}, "unknown model_type ''"),
        ({"hidden_size": None}, "field hidden_size is missing"),
        ({"num_hidden_layers": 0}, "field num_hidden_layers must be a whole number of at least 1, not 0"),
        ({"vocab_size": "x"}, "field vocab_size must be a whole number"),
        ({"num_attention_heads": 30}, "30 heads cannot share 8 KV heads evenly"),
        ({"hidden_size": 16}, "a hidden size of 16 is too small for 32 heads"),
        ({"torch_dtype": "float1"}, "unknown dtype 'float1'"),
        ({"quantization_config": {"quant_method": "x"}}, "has no number of bits"),
    ],
)
def test_errors_name_file_and_field(directory, change, message):
    path = directory(CONFIGS["llama-3.1-8b"] | change)
    with pytest.raises(ModelError) as error:
        read_model(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_rejects_directories_without_a_model(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json, so it is not a model directory"):
        read_model(tmp_path)
    for content in (b"{", b"[]", b"\xff"):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ModelError, match="is not a JSON object"):
            read_model(tmp_path)
