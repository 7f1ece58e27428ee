"""Load a policy and compute its token log-probs on a packed or padded batch, head included, in one forward.

T = tokens of the batch, N = its completion tokens, D = model dim, V = vocabulary.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from towline.trainer.attention import batch_arguments, shares_prompts
from towline.trainer.config import LoraConfig
from towline.trainer.fused_loss import TokenLoss, fused_token_loss
from towline.trainer.head import head_transform
from towline.trainer.head_check import check_head
from towline.trainer.int8 import int8_weights
from towline.trainer.logprobs import token_logprobs, token_logprobs_and_entropy
from towline.trainer.lora import add_adapters, head_weight
from towline.trainer.packing import PackedBatch
from towline.trainer.packing_step import Packing
from towline.trainer.packing_work import work_model
from towline.trainer.pretrained import (
    arguments_of_text,
    assert_apart,
    checkpoint_gradients,
    from_folder,
    training_device,
    usual_attention,
)


class Policy(nn.Module):
    """A causal language model whose forward gives log-probs, so that the head is used where ZeRO-3 gathers it."""

    def __init__(self, model: Any, temperature: float) -> None:
        super().__init__()
        self.model = model
        self._transform = head_transform(model.config)
        self.work = work_model(model)
        """What a step's balance goes by."""
        self._temperature = temperature

    @property
    def shares_prompts(self) -> bool:
        """Whether completions of one prompt may be cut into one piece, see `packing_plan.cut_into_pieces`."""
        return shares_prompts(self.model)

    @property
    def direct_parameters(self) -> list[nn.Parameter]:
        """Weights that `forward` reads itself, without calling the module that holds them."""
        return list(self.model.get_output_embeddings().parameters())

    @contextlib.contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Inside the block, log-probs are at another temperature than that of sampling."""
        usual, self._temperature = self._temperature, temperature
        try:
            yield
        finally:
            self._temperature = usual

    @overload
    def forward(self, batch: PackedBatch, *, with_entropy: bool = False) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(
        self,
        batch: PackedBatch,
        *,
        with_entropy: bool = False,
        token_loss: TokenLoss,
        label_smoothing: float = 0.0,
        groups: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def forward(
        self,
        batch: PackedBatch,
        *,
        with_entropy: bool = False,
        token_loss: TokenLoss | None = None,
        label_smoothing: float = 0.0,
        groups: Sequence[int] | None = None,
    ) -> tuple[Tensor, ...]:
        """Return log-probs at the sampling temperature and, if wanted, entropies (nats); both [N] float32.

        Args:
            token_loss: of each completion token by itself, or of `groups` of neighbours; before the two comes then the
                sum of it, and it alone carries gradients, see `fused_loss`.
            label_smoothing, groups: of `token_loss`, see `fused_loss.fused_token_loss`.
        """
        device = next(self.model.parameters()).device
        assert self.shares_prompts or not batch.shares_prompts, "pieces were cut with shares_prompts, see Policy"
        # One packed row, or padded rows one after the other: `logit_index` counts through both.
        hidden_TD = self.model.get_decoder()(**batch_arguments(batch, device)).last_hidden_state.flatten(0, 1)
        hidden_ND = hidden_TD[torch.from_numpy(batch.logit_index).to(device)]
        head = self.model.get_output_embeddings()
        weight_VD = head_weight(head)
        targets_N = torch.from_numpy(batch.target_ids).to(device)
        options: dict[str, Any] = {
            "temperature": self._temperature,
            "head_bias_V": getattr(head, "bias", None),
            "transform": self._transform,
        }
        if token_loss is not None:
            options |= {"with_entropy": with_entropy, "label_smoothing": label_smoothing, "groups": groups}
            return fused_token_loss(hidden_ND, weight_VD, targets_N, token_loss, **options)
        assert label_smoothing == 0, "label_smoothing is of a token_loss, found none"
        assert groups is None, "groups are of a token_loss, found none"
        if with_entropy:
            return token_logprobs_and_entropy(hidden_ND, weight_VD, targets_N, **options)
        logprobs_N = token_logprobs(hidden_ND, weight_VD, targets_N, **options)
        return logprobs_N, logprobs_N.new_empty(0)


def load_policy(
    folder: Path,
    *,
    temperature: float,
    precision: str,
    gradient_checkpointing: bool = False,
    attention: str | None = None,
    packing: Packing = "packed",
    is_int8: bool = False,
    lora: LoraConfig | None = None,
) -> Policy:
    """Load the model and prove that its micro-batches and chunked log-probs are right for it.

    Args:
        attention: transformers' name of one that isolates packed sequences, by default `usual_attention`. For buckets
            transformers' own choice, or "eager" for a model that caps its attention scores: "sdpa" leaves the cap out.
        packing: "packed" sequences in one row, or "buckets" of padded rows.
        is_int8: round the weights of linear layers to int8, see `int8.int8_weights`; it cannot be trained.
        lora: put adapters in, which alone are trained. Ranks must draw the same: seed torch alike before.

    Raises:
        ModelError: the folder holds no causal language model, or one that cannot be trained in this way; or torchao is
            missing.
    """
    device = training_device()
    if attention is None:
        attention = usual_attention(packing, precision)
    options: dict[str, Any] = {"quantization_config": int8_weights()} if is_int8 else {}
    model = load_model(folder, precision, attention, **options)
    if lora is not None:
        add_adapters(model, lora, folder)
    model.to(device)
    assert_apart(model, packing)
    token_ids_T = torch.arange(1, 18, device=device) % model.config.get_text_config().vocab_size
    check_head(model, token_ids_T, arguments=arguments_of_text(token_ids_T, packing))
    if gradient_checkpointing:
        checkpoint_gradients(model)
    return Policy(model, temperature)


def load_model(folder: Path, precision: str, attention: str | None = None, **options: Any) -> Any:
    """The transformers model in main memory, as `from_pretrained` makes it with these options.

    Args:
        attention: by default transformers' own choice, or "eager" for a model that caps its attention scores.

    Raises:
        ModelError: the folder holds no causal language model, or one that cannot have this attention.
    """
    return from_folder(AutoModelForCausalLM, "a causal language model", folder, precision, attention, **options)
