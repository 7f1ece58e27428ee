"""The receiving end of a weight publication, as a weight-transfer engine of vLLM named "towline".

Call order, between two engine steps:

    init_weight_transfer_engine(membership)     once per formation of the group
    start_weight_update()                       nothing happens to the model
    update_weights({...})                       bytes are staged on the host and hashed; raises on a broken stream,
                                                may come again when the publisher refuses the digest
    ... the publisher compares digests and commits ...
    finish_weight_update()                      the staged weights are loaded; the model changes here only

A stream that breaks or whose digest differs leaves the old weights whole, and may simply be sent again.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from towline.rollout.receive_stream import receive_stream
from towline.rollout.transfer_group import Membership, TransferGroup
from towline.storage.errors import TransferError

BACKEND = "towline"


@dataclass
class JoinInfo(WeightTransferInitInfo):
    store: str
    prefix: str
    first_rank: int
    """Transfer rank of this engine's worker 0; its other tensor-parallel workers follow."""
    size: int
    backend: str


@dataclass
class StreamInfo(WeightTransferUpdateInfo):
    version: int
    timeout_s: float


class WeightReceiver(WeightTransferEngine[JoinInfo, StreamInfo]):
    init_info_cls = JoinInfo
    update_info_cls = StreamInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: TransferGroup | None = None
        self._staged: list[tuple[str, torch.Tensor]] = []
        self.digest = ""

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        self._group = TransferGroup(
            Membership(
                store=init_info.store,
                prefix=init_info.prefix,
                rank=init_info.first_rank + self.parallel_config.rank,
                size=init_info.size,
                backend=init_info.backend,
            )
        )

    def start_weight_update(self) -> None:
        """Nothing to prepare: the model is first touched in `finish_weight_update`."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class ends in torch.accelerator.synchronize(), which does not exist on CPU.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: StreamInfo) -> None:
        assert self._group is not None, "init_weight_transfer_engine comes first"
        self._staged, self.digest = [], ""  # of a stream that was refused: two copies of the model need not fit
        header, self._staged, self.digest = receive_stream(self._group, update_info.timeout_s)
        if header.version != update_info.version:
            raise TransferError(f"weights of version {header.version} arrived, version {update_info.version} was due.")

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model: Any = self.model
        initialize_layerwise_reload(model)
        model.load_weights(iter(self._staged))
        finalize_layerwise_reload(model, self.model_config)
        if self.device.type == "cpu":
            repack_output_head(model)
        self._staged = []

    def shutdown(self) -> None:
        self._group = None


def repack_output_head(model: torch.nn.Module) -> None:
    """Refresh the CPU build's packed copy of a tied output head, which a reload leaves silently stale."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def register() -> None:
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, WeightReceiver)
