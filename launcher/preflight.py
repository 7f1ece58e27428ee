"""Everything that can be known before a process of the run starts: problems, which stop it, and warnings."""

import dataclasses
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from towline.jobs.devices import assign_gpus, visible_gpus
from towline.jobs.experiment import DpoExperiment, ExperimentConfig, IteratedDpoExperiment, RolloutExperiment
from towline.launcher.example_preflight import look_at_examples
from towline.launcher.experiment_file import ExperimentFile
from towline.launcher.findings import Findings
from towline.launcher.model_folder import ModelSizes, looks_like_hub_name, read_sizes
from towline.launcher.plan import Plan, size_text
from towline.launcher.preference_beta import beta_warnings
from towline.launcher.processor import slow_precision
from towline.launcher.prompt_preflight import Tokenizer, look_at_prompts
from towline.launcher.several_runs import runs_of
from towline.launcher.tokenized_prompts import tokenize
from towline.storage.dataset_files import shown
from towline.storage.errors import InputError
from towline.storage.run_directory import RunDirectory, is_locked

RUN_PACKAGES = ("torch", "transformers", "deepspeed", "mpi4py")


def preflight(
    file: ExperimentFile,
    experiment: ExperimentConfig,
    tokenizer: Tokenizer = tokenize,
    *,
    for_cluster: str | None = None,
) -> Findings:
    """Look at everything an experiment names. Raises nothing for a bad input: it is among the problems.

    Args:
        for_cluster: name of the cluster where it will run; None: this machine.
        tokenizer: counts and renders prompts; default: the model's own, which needs transformers.
    """
    found = Findings()
    found.model = found.attempt(lambda: _model(file, experiment, for_cluster))
    if isinstance(experiment, RolloutExperiment):
        look_at_prompts(found, file, experiment, tokenizer, for_cluster)
    else:
        look_at_examples(found, file, experiment)
    if isinstance(experiment, DpoExperiment | IteratedDpoExperiment):
        found.warnings += beta_warnings(file, experiment)
    found.problems += _adapter_problems(file, experiment, found.model)
    if for_cluster is None:
        found.warnings += filter(None, [slow_precision(experiment)])
    runs = runs_of(file.path, experiment)
    found.problems += dict.fromkeys(problem for one in runs for problem in _run_folder_problems(file, one))
    if found.plan is not None:
        found.plan = dataclasses.replace(found.plan, num_runs=len(runs))
        _compare_disk(found, found.plan, experiment.run.root)
        if for_cluster is None:
            _compare_memory(found, found.plan)
    return found


def machine_problems(experiment: ExperimentConfig) -> list[str]:
    """What this machine lacks to carry out a run; a login node may lack it all."""
    packages = [
        *RUN_PACKAGES,
        *(["vllm"] if isinstance(experiment, RolloutExperiment) and experiment.rollout.engine == "vllm" else []),
        *(["peft"] if experiment.trainer.lora is not None else []),
    ]
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    problems = [f"{', '.join(missing)} cannot be imported by {sys.executable}: bash env/setup.sh"] if missing else []
    if shutil.which("mpirun") is None and not Path(sys.executable).with_name("mpirun").is_file():
        problems.append("mpirun is neither on the PATH nor beside Python: bash env/setup.sh installs Open MPI")
    local = experiment.local
    try:
        assign_gpus(visible_gpus(), trainer_ranks=local.trainer_ranks, engines=experiment.num_engines)
    except InputError as error:
        problems.append(str(error))
    return problems


def _model(file: ExperimentFile, experiment: ExperimentConfig, cluster: str | None) -> ModelSizes:
    folder = Path(experiment.policy.model)
    name = "/".join(folder.parts[-2:])
    if looks_like_hub_name(name, folder) and file.writes("policy.model", name):
        local = Path("models") / folder.name
        why = "a run takes its model from a folder and fetches nothing" if cluster is None else (
            f"{cluster}'s compute nodes are offline"
        )  # fmt: skip
        raise InputError(
            f'{file.where("policy.model")}: policy.model "{name}" is a Hub name; {why}.\n'
            f"  hf download {name} --local-dir {shown(file.folder / local)}\n"
            f'  then model = "{local}". Nothing was started.'
        )
    return read_sizes(folder)


def _adapter_problems(file: ExperimentFile, experiment: ExperimentConfig, model: ModelSizes | None) -> Iterator[str]:
    key, lora = "trainer.lora.target_modules", experiment.trainer.lora
    if model is None or lora is None:
        return
    for target in model.unknown_targets(lora):
        yield (
            f'{file.where(key)}: {key}: "{target}" names no layer of policy.model {experiment.policy.model}; its '
            f"layers are: {', '.join(model.layer_names) or 'none that can have an adapter'}."
        )


def _run_folder_problems(file: ExperimentFile, experiment: ExperimentConfig) -> Iterator[str]:
    root = experiment.run.root
    nearest = nearest_folder(root)
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        yield f"{file.where('run.root')}: run.root {root}: {nearest} is not a folder that you may write to."
    elif experiment.run.name is not None and (root / experiment.run.name).exists():
        run = RunDirectory(root / experiment.run.name)
        in_use = " and a run is using it now" if is_locked(run) else ""
        yield (
            f"{file.where('run.name')}: run folder {shown(run.root)} exists{in_use}; nothing is overwritten. Choose "
            "another with -o run.name=NAME, or leave the name out."
        )


def nearest_folder(path: Path) -> Path:
    """The path itself, or the innermost of its parents that is there."""
    return next(place for place in (path, *path.parents) if place.exists())


def _compare_disk(found: Findings, plan: Plan, root: Path) -> None:
    free = free_bytes(root)
    if plan.disk > free:
        found.problems.append(
            f"run.root {root} has {size_text(free)} free and the run needs up to {size_text(plan.disk)}: "
            f"{plan.in_each_run}{plan.kept_checkpoints} checkpoints of {size_text(plan.checkpoint)} and "
            f"{size_text(plan.shards)} of shards. "
            "Free some, lower trainer.keep_checkpoints, or set run.root to another disk."
        )


def _compare_memory(found: Findings, plan: Plan) -> None:
    if not has_gpu() and plan.memory > (available := psutil.virtual_memory().available):
        found.warnings.append(
            f"the run may need {size_text(plan.memory)} of memory and {size_text(available)} is available: it may be "
            "killed. A smaller trainer.max_tokens_per_microbatch or rollout.kv_cache_gib needs less"
        )


def free_bytes(root: Path) -> int:
    return shutil.disk_usage(nearest_folder(root)).free


def has_gpu() -> bool:
    return Path("/proc/driver/nvidia/gpus").is_dir()


def raise_problems(problems: Sequence[str]) -> None:
    """
    Raises:
        InputError: all problems, one after the other.
    """
    if problems:
        raise InputError("\n".join(problems))
