"""A model whose linear layers keep one byte a weight: torchao's Int8WeightOnly, by way of transformers."""

from typing import Any

from transformers import TorchAoConfig
from transformers.utils.import_utils import is_torchao_available

from towline.storage.errors import ModelError


def int8_weights() -> Any:
    """The `quantization_config` with which `from_pretrained` rounds linear layers to int8, one scale an output channel.

    Embeddings, the output layer and activations stay in full precision. In bfloat16 the log-probs of SmolLM2-135M are
    then off by 0.084 nats in the mean, where bfloat16 alone is by 0.041: docs/adr/0012-homes-of-the-reference.md.

    Raises:
        ModelError: torchao is not installed.
    """
    if not is_torchao_available():
        raise ModelError(
            'policy.reference = "int8" needs torchao, which is not installed here: pip install torchao==0.18.0 '
            '(env/*.lock has it), or set policy.reference = "offloaded"'
        )
    from torchao.quantization import Int8WeightOnlyConfig  # pyright: ignore[reportMissingImports]: an older environment

    return TorchAoConfig(Int8WeightOnlyConfig())
