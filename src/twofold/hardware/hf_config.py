"""Conversion of Hugging Face model directories to catalog models, without loading weights."""

import datetime as dt
from pathlib import Path

import msgspec

from twofold.hardware.architectures import ARCHITECTURES, ConfigJson
from twofold.hardware.specs import Model
from twofold.hardware.suggestions import unknown_name

_DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_DEFAULT_BYTES = 2  # default dtype: half precision


class _IndexMetadata(msgspec.Struct):
    total_size: float


class _Index(msgspec.Struct):
    metadata: _IndexMetadata


def read_model(directory: Path) -> Model:
    """Create the catalog entry of a model from a directory with a config.json. Raises ModelError if unsupported."""
    config = ConfigJson(directory)
    kind = config.text("model_type", default="")
    if kind not in ARCHITECTURES:
        raise config.error(str(unknown_name("model_type", kind, ARCHITECTURES)))
    sizes = ARCHITECTURES[kind](config)
    if sizes.heads % sizes.kv_heads:
        raise config.error(f"{sizes.heads} heads cannot share {sizes.kv_heads} KV heads evenly")
    if sizes.head_dim < 1:
        raise config.error(f"a hidden size of {sizes.hidden_size} is too small for {sizes.heads} heads")
    value_bytes = _value_bytes(config)
    weight_bytes = _quantized_bytes(config, directory, sizes.parameters)
    return Model(
        name=directory.resolve().name,
        weight_bytes=sizes.parameters * value_bytes if weight_bytes is None else weight_bytes,
        dtype_bytes=value_bytes if weight_bytes is None else max(1, round(weight_bytes / sizes.parameters)),
        kv_dtype_bytes=value_bytes,
        source=str(config.path),
        date=dt.datetime.fromtimestamp(config.path.stat().st_mtime, tz=dt.UTC).date().isoformat(),
        **msgspec.structs.asdict(sizes),
    )


def _value_bytes(config: ConfigJson) -> int:
    """Return the bytes per value of the model's dtype."""
    name = config.text("dtype", "torch_dtype", default="")
    if name and name not in _DTYPE_BYTES:
        raise config.error(str(unknown_name("dtype", name, _DTYPE_BYTES)))
    return _DTYPE_BYTES.get(name, _DEFAULT_BYTES)


def _quantized_bytes(config: ConfigJson, directory: Path, parameters: int) -> int | None:
    """Return the size of quantized weights in bytes, or None if the weights are not quantized."""
    quantization = config.table("quantization_config")
    if quantization is None:
        return None
    stored = _stored_bytes(directory)
    if stored:
        return stored
    bits = 8 if quantization.get("quant_method") == "fp8" else quantization.get("bits")
    if not isinstance(bits, int) or bits < 1:
        raise config.error("the weights are quantized and missing, and quantization_config has no number of bits")
    return -(-parameters * bits // 8)


def _stored_bytes(directory: Path) -> int:
    """Return the total size of the weight files in bytes, or 0 without weight files."""
    index = directory / "model.safetensors.index.json"
    try:
        return round(msgspec.json.decode(index.read_bytes(), type=_Index).metadata.total_size)
    except (OSError, msgspec.DecodeError):  # no usable index: sum the file sizes
        return sum(path.stat().st_size for path in directory.glob("model*.safetensors"))
