"""The reference policy: frozen, or refreshed from the policy now and then. Its log-probs carry no gradient.

N = completion tokens of a micro-batch.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from towline.storage.errors import CheckpointError
from towline.trainer.config import Home, TrainerConfig
from towline.trainer.deepspeed_engine import DeepSpeedEngine, overwrite, shard_frozen
from towline.trainer.hf_folder import gather_weights, write_hf_folder
from towline.trainer.offload import OffloadedWeights
from towline.trainer.packing import PackedBatch
from towline.trainer.policy import Policy, load_model, load_policy
from towline.trainer.preference_config import IteratedDpoConfig

KEPT = "reference"
"""Name of a refreshed reference's folder in a checkpoint."""


class Reference:
    """In the policy's precision and with the policy's sharding, in one of three homes (`policy.reference`).

    A refreshed reference is always read from a folder that was written for it. So a resumed run, which reads the copy
    in its checkpoint, has the same bits in every home, also with another number of ranks.

        logprobs = reference.logprobs(batches)      # once a step: an offloaded reference is then fetched once
        reference.refresh_if_due(engine, version, …)  # on the steps that TrainerConfig.last_refresh names
        reference.keep(checkpoint)                  # rank 0, while a checkpoint is written
        reference.take_up(checkpoint, step)         # going on from it
        reference.discard()                         # in the end

    Args:
        folder: the model that the run begins with.
        refreshed: folder in which refreshed references are written, seen by all ranks; needed by `refresh`.
        adapted: trains adapters of this very model. No other is loaded then: the reference is the policy without them.
    """

    def __init__(
        self,
        folder: Path,
        config: TrainerConfig | IteratedDpoConfig,
        *,
        temperature: float,
        home: Home = "on_device",
        refreshed: Path | None = None,
        adapted: DeepSpeedEngine | None = None,
    ) -> None:
        self._folder, self._config, self._temperature, self._home = folder, config, temperature, home
        self._refreshed = refreshed
        self.version: int | None = None
        """Policy version that it is; None for the model that the run began with."""
        self._adapted = adapted
        if adapted is None:
            self._settle_in(self._load(folder))

    @torch.no_grad()
    def logprobs(self, batches: Iterable[PackedBatch]) -> list[Tensor]:
        """[N] float32 of each batch, at the sampling temperature.

        Every rank must call it, with as many batches: ZeRO-3 gathers.
        """
        if self._adapted is not None:
            with self._adapted.without_adapters():
                return [self._adapted.evaluate(batch) for batch in batches]
        with self._at_hand():
            return [self._policy(batch)[0] for batch in batches]

    def refresh(self, engine: DeepSpeedEngine, version: int, on_progress: Callable[[], None] = lambda: None) -> None:
        """Become the policy that `engine` trains, which has this version. Every rank must call it.

        Raises:
            CheckpointError: the weights could not be written. Raised on every rank; the reference is as it was.
        """
        weights = gather_weights(engine, self._config.precision, on_progress)

        def write(folder: Path) -> None:
            write_hf_folder(engine.policy.model, weights, folder, self._folder)

        self._replace(self._folder_of(version), write)
        on_progress()
        self._become(version)
        on_progress()

    def refresh_if_due(self, engine: DeepSpeedEngine, version: int, on_progress: Callable[[], None]) -> None:
        """`refresh` where the config says so. Every rank must call it."""
        if self._config.last_refresh(version) == version:
            self.refresh(engine, version, on_progress)

    def keep(self, checkpoint: Path) -> None:
        """Put a copy of a refreshed reference into a checkpoint, so that no other one need be kept for its sake.

        Raises:
            OSError: it could not be written.
        """
        if self.version is not None:
            _copy(self._folder_of(self.version), checkpoint / KEPT)

    def take_up(self, checkpoint: Path, step: int) -> None:
        """Become the reference of outer step `step`, whose checkpoint this is. Every rank must call it.

        Raises:
            CheckpointError: the weights could not be copied. Raised on every rank.
        """
        version = self._config.last_refresh(step)
        if version is None:
            return
        self._replace(self._folder_of(version), lambda folder: _copy(checkpoint / KEPT, folder))
        self._become(version)

    def discard(self) -> None:
        """Remove the folder that `refresh` wrote: checkpoints have copies of their own."""
        if self.version is not None and dist.get_rank() == 0:
            shutil.rmtree(self._folder_of(self.version), ignore_errors=True)

    # --- weights -------------------------------------------------------------------------------------------------

    def _load(self, folder: Path) -> Policy:
        return load_policy(
            folder,
            temperature=self._temperature,
            precision=self._config.precision,
            packing=self._config.packing,
            is_int8=self._home == "int8",
        )

    def _settle_in(self, policy: Policy) -> None:
        self._offloaded: OffloadedWeights | None = None
        is_offloaded = self._home == "offloaded"
        device = next(policy.parameters()).device
        # Any: a policy, or DeepSpeed around one. ZeRO-3 has its own way to keep shards in main memory.
        self._policy: Any = shard_frozen(policy, self._config, is_offloaded=is_offloaded)
        if is_offloaded and self._config.zero_stage < 3:
            self._offloaded = OffloadedWeights(policy, device)

    def _become(self, version: int) -> None:
        folder = self._folder_of(version)
        if self._home == "int8":
            # Rounded to int8 weights do not say what they were: rounded anew. The old ones make room first.
            self._policy = None
            self._settle_in(self._load(folder))
        else:
            # In place: DeepSpeed never lets go of a model that it has sharded.
            overwrite(self._policy, load_model(folder, self._config.precision))
        self.version = version
        # Nobody reads a folder any more when it is removed.
        dist.barrier()
        if dist.get_rank() == 0:
            for other in folder.parent.glob("reference-*"):
                if other != folder:
                    shutil.rmtree(other, ignore_errors=True)

    def _at_hand(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._offloaded is None else self._offloaded.on_device()

    # --- folders -------------------------------------------------------------------------------------------------

    def _folder_of(self, version: int) -> Path:
        assert self._refreshed is not None, "a reference that is refreshed needs a folder"
        # A name of its own: other nodes may see for a while what a name held before.
        return self._refreshed / f"reference-{version:06d}"

    @staticmethod
    def _replace(target: Path, write: Callable[[Path], None]) -> None:
        """Rank 0 writes a folder, whole or not at all; where it cannot, every rank raises: none waits for it."""
        problems: list[str | None] = [None]
        if dist.get_rank() == 0:
            part = target.with_suffix(".part")
            try:
                for left in (part, target):
                    shutil.rmtree(left, ignore_errors=True)
                part.parent.mkdir(parents=True, exist_ok=True)
                write(part)
                part.rename(target)
            except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own
                shutil.rmtree(part, ignore_errors=True)
                free = shutil.disk_usage(target.parent).free if target.parent.is_dir() else 0
                problems = [f"{free} bytes are free: {error}"]
        dist.broadcast_object_list(problems, src=0)
        if problems[0] is not None:
            raise CheckpointError(
                f"the refreshed reference {target} could not be written. {problems[0]}. Checkpoints are whole. Free "
                "space on that file system or lower trainer.keep_checkpoints, then resume."
            )


def _copy(source: Path, target: Path) -> None:
    """Of files that nobody changes: as a second name of the same file where the file system allows it."""
    shutil.copytree(source, target, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
