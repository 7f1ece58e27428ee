"""Write and take up a checkpoint, on all trainer ranks together. Which checkpoints count is storage/checkpoints.py's.

step-000012/
    engine/            DeepSpeed's parts: weights and optimiser state
    rng/rank-R.json    random number generators of each rank
    hf/                the policy as a Hugging Face folder, with tokenizer and chat template
    adapter/           with [trainer.lora] the adapters as a folder that peft reads; hf/ has them merged
    reference/         the reference likewise, once it was refreshed (trainer.reference_every)
    complete.json      training state, and size and digest of all the files; written last
"""

import base64
import contextlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from towline.storage import checkpoints
from towline.storage.checkpoints import FileRecord, TrainingState
from towline.storage.errors import CheckpointError
from towline.trainer.deepspeed_engine import DeepSpeedEngine, convert_to_universal
from towline.trainer.hf_folder import gather_weights, write_hf_folder
from towline.trainer.lora import write_adapter_folder
from towline.trainer.reference import Reference


def save_checkpoint(
    engine: DeepSpeedEngine,
    folder: Path,
    state: TrainingState,
    *,
    model_folder: Path,
    keep: int,
    on_progress: Callable[[], None],
    reference: Reference | None = None,
) -> None:
    """Write the checkpoint of `state.step` whole or not at all, then remove all but the newest `keep`.

    Every rank must call it. One of the same step and state that is whole already stays as it is; one of the same step
    with another state is replaced.

    Args:
        folder: of all checkpoints of the run.
        model_folder: of the model that the policy started from; its tokenizer is copied.
        on_progress: told after each piece of work.
        reference: kept with the checkpoint if it was refreshed; else the model folder holds it.

    Raises:
        CheckpointError: a rank could not write. Raised on every rank; earlier checkpoints are whole.
    """
    step, path, is_first = state.step, checkpoints.checkpoint_path(folder, state.step), dist.get_rank() == 0
    if _from_first(lambda: _is_kept(folder, state)):
        return
    with _together(folder, step):
        if is_first:
            checkpoints.remove(folder, step)
            (path / "rng").mkdir(parents=True)
    with _together(folder, step):
        engine.save(path, {})
    on_progress()
    weights, adapters = gather_weights(engine, state.precision, on_progress), engine.adapters()
    with _together(folder, step):
        _write_json(_rng_file(path), _rng_state())
        if is_first:
            write_hf_folder(engine.policy.model, weights, path / "hf", model_folder)
            if adapters:
                write_adapter_folder(engine.policy.model, adapters, path / "adapter")
            if reference is not None:
                reference.keep(path)
    on_progress()
    files = _seal(folder, step, on_progress)
    with _together(folder, step):
        if is_first:
            checkpoints.mark_complete(folder, step, state, files)
            checkpoints.retain(folder, keep)


def load_checkpoint(
    engine: DeepSpeedEngine,
    folder: Path,
    step: int,
    present: TrainingState,
    *,
    on_progress: Callable[[], None] = lambda: None,
    reference: Reference | None = None,
) -> TrainingState:
    """Take up policy, optimiser, reference and random numbers as they were saved; return the saved state.

    Every rank must call it, with a fresh engine. With another number of ranks than saved, weights and moments are the
    same, but sums over ranks are rounded differently and each rank's random numbers are seeded anew.

    Args:
        present: the state as this run would have it at that step.
        reference: made to be the one of that step.

    Raises:
        CheckpointError: a part would be reset or mismatched, or a file is damaged. Raised on every rank, naming all.
    """
    _refuse_problems(folder, step, present)
    on_progress()
    saved = checkpoints.read_state(folder, step)
    path, num_ranks = checkpoints.checkpoint_path(folder, step), dist.get_world_size()
    if reference is not None:
        reference.take_up(path, step)
        on_progress()
    if saved.ranks == num_ranks:
        engine.load(path)
        _restore_rng(json.loads(_rng_file(path).read_text()))
        return saved
    if saved.zero_stage == 0:  # every rank holds all of it
        engine.load(path)
    else:
        _load_universal(engine, folder, step, on_progress)
    _seed_rng([saved.seed, step, dist.get_rank()])
    if dist.get_rank() == 0:
        print(
            f"checkpoint of step {step}: written by {saved.ranks} ranks, taken up by {num_ranks}. Weights and optimiser"
            " state are the same; from here on bits may differ from the undisturbed run, and each rank's random numbers"
            " are seeded anew from (seed, step, rank).",
            flush=True,
        )
    return saved


# --- writing -----------------------------------------------------------------------------------------------------


def _is_kept(folder: Path, state: TrainingState) -> bool:
    """Whether this very state is on disk already, as after a resume that is stopped before its first step."""
    if not state.stream_digest or state.step not in checkpoints.complete_steps(folder):
        return False
    try:
        return checkpoints.read_state(folder, state.step) == state
    except CheckpointError:
        return False


def _seal(folder: Path, step: int, on_progress: Callable[[], None]) -> dict[str, FileRecord]:
    """Bring every file to the disk and hash it; each rank takes a share of those that rank 0 sees."""
    names = _from_first(lambda: checkpoints.list_files(folder, step))
    records: dict[str, FileRecord] = {}
    with _together(folder, step):
        for name in names[dist.get_rank() :: dist.get_world_size()]:
            records |= checkpoints.seal_files(folder, step, [name])
            on_progress()
    shares = _gather(records)
    return {name: record for share in shares for name, record in share.items()}


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))


# --- reading -----------------------------------------------------------------------------------------------------


def _refuse_problems(folder: Path, step: int, present: TrainingState) -> None:
    found = dict.fromkeys(problem for share in _gather(_problems(folder, step, present)) for problem in share)
    if found:
        lines = "".join(f"\n  - {problem}" for problem in found)
        raise CheckpointError(f"cannot go on from {checkpoints.checkpoint_path(folder, step)}:{lines}")


def _problems(folder: Path, step: int, present: TrainingState) -> list[str]:
    """What does not fit, and what is wrong with this rank's share of the files."""
    try:
        mismatches = checkpoints.differences(checkpoints.read_state(folder, step), present)
        damages = checkpoints.verify_files(folder, step, part=dist.get_rank(), parts=dist.get_world_size())
    except (CheckpointError, OSError) as error:
        return [str(error)]
    remedy = "" if not damages else ". Remove its step folder to go on from the checkpoint before it"
    return mismatches + [damage + remedy for damage in damages]


def _load_universal(engine: DeepSpeedEngine, folder: Path, step: int, on_progress: Callable[[], None]) -> None:
    """By way of whole tensors, beside the step folders and only for as long as it takes to load them."""
    target, is_first = folder / "universal", dist.get_rank() == 0
    problem = _from_first(lambda: _convert(checkpoints.checkpoint_path(folder, step), target))
    if problem is not None:
        raise CheckpointError(problem)
    on_progress()
    engine.load(target, is_universal=True)
    dist.barrier()
    if is_first:
        shutil.rmtree(target, ignore_errors=True)


def _convert(source: Path, target: Path) -> str | None:
    shutil.rmtree(target, ignore_errors=True)
    try:
        convert_to_universal(source, target)
    except (OSError, RuntimeError) as error:
        free = shutil.disk_usage(source).free
        shutil.rmtree(target, ignore_errors=True)
        return (
            f"{source} cannot be cut for another number of ranks: {error}. {free} bytes were free on its file system, "
            "and about twice the checkpoint's size is needed. Free some, or start as many trainer ranks as saved it."
        )
    return None


# --- random numbers ----------------------------------------------------------------------------------------------


def _rng_file(path: Path) -> Path:
    return path / "rng" / f"rank-{dist.get_rank()}.json"


def _rng_state() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    return {
        "python": [version, list(internal), gauss],
        "numpy": numpy | {"state": {"key": numpy["state"]["key"].tolist(), "pos": numpy["state"]["pos"]}},
        "torch": _to_text(torch.get_rng_state()),
        "cuda": _to_text(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }


def _restore_rng(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numbers = state["numpy"]
    key = np.array(numbers["state"]["key"], dtype=np.uint32)
    np.random.set_state(numbers | {"state": {"key": key, "pos": numbers["state"]["pos"]}})
    torch.set_rng_state(_from_text(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_text(state["cuda"]))


def _seed_rng(entropy: list[int]) -> None:
    """Seed each generator differently, all from the same numbers."""
    for_python, for_numpy, for_torch = np.random.SeedSequence(entropy).generate_state(3).tolist()
    random.seed(for_python)
    np.random.seed(for_numpy)
    torch.manual_seed(for_torch)


def _to_text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(text: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())


# --- together ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _together(folder: Path, step: int) -> Iterator[None]:
    """Write on every rank; where one cannot, all clear up and raise: none waits for a rank that is gone."""
    problem = None
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own for a full disk
        free = shutil.disk_usage(folder).free if folder.is_dir() else 0
        first_line = (str(error).splitlines() or [type(error).__name__])[0]  # torch adds its C++ frames
        problem = f"rank {dist.get_rank()}, where {free} bytes are free: {first_line}"
    problems = [text for text in _gather(problem) if text is not None]
    if not problems:
        return
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError):
            checkpoints.remove_incomplete(folder, step)
    raise CheckpointError(
        f"checkpoint {checkpoints.checkpoint_path(folder, step)} could not be written. {'; '.join(problems)}. "
        "Earlier checkpoints are whole. Free space on that file system or lower trainer.keep_checkpoints, then resume."
    )


def _gather(value: Any) -> list[Any]:
    """Everybody's value, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _from_first(make: Callable[[], Any]) -> Any:
    """What rank 0 makes of it, on every rank."""
    values = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(values, src=0)
    return values[0]
