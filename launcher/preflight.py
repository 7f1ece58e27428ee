"""Everything that can be known before a process of the run starts: problems, which stop it, and warnings."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from towline.jobs.devices import assign_gpus, visible_gpus
from towline.jobs.experiment import ExperimentConfig
from towline.launcher.experiment_file import ExperimentFile
from towline.launcher.model_folder import ModelSizes, looks_like_hub_name, read_sizes
from towline.launcher.plan import Plan, make_plan, size_text
from towline.launcher.processor import slow_precision
from towline.launcher.reward_source import located_problems
from towline.launcher.tokenized_prompts import Tokenized, can_tokenize, tokenize
from towline.launcher.unreadable_golds import unreadable_golds
from towline.rollout.rewards.config import CODE_TESTS
from towline.rollout.sandbox.isolation import Isolation
from towline.rollout.sandbox.sandbox import try_sandbox
from towline.storage.data_config import DataConfig
from towline.storage.dataset_files import shown
from towline.storage.datasets import PromptDataset, survey_prompts
from towline.storage.errors import InputError
from towline.storage.run_directory import RunDirectory, is_locked

T = TypeVar("T")
Tokenizer = Callable[[Path, Sequence[tuple[Sequence[str], bool]]], list[Tokenized]]
RUN_PACKAGES = ("torch", "transformers", "deepspeed", "mpi4py")


@dataclass(slots=True, kw_only=True)
class Prompts:
    """A dataset and the tokens of each prompt."""

    key: str
    """Where the experiment says it: `data` or `evaluation.data`."""
    data: PromptDataset
    chat: bool
    tokens: tuple[int, ...] | None = None
    """None where they could not be counted."""
    rendered: tuple[str, ...] = ()
    """The first prompts as the model reads them, where its tokenizer can be loaded."""


@dataclass(slots=True, kw_only=True)
class Findings:
    problems: list[str] = field(default_factory=list[str])
    warnings: list[str] = field(default_factory=list[str])
    model: ModelSizes | None = None
    train: Prompts | None = None
    held_out: Prompts | None = None
    plan: Plan | None = None
    isolation: Isolation | None = None
    """What shuts in the programs of a code reward on this machine; None where none are run, or nothing does."""

    def attempt(self, find: Callable[[], T]) -> T | None:
        """Note the InputError that `find` raises, so that one problem does not hide the next."""
        try:
            return find()
        except InputError as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))
            return None


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
    found.train = _read_prompts(found, "data", experiment.data)
    if experiment.evaluation is not None:
        found.held_out = _read_prompts(found, "evaluation.data", experiment.evaluation.data)
    _tokenize(found, Path(experiment.policy.model), tokenizer)
    found.problems += located_problems(file, experiment.rewards)
    _read_golds(found, experiment)
    _try_sandbox(found, experiment, for_cluster)
    found.problems += _schedule_problems(file, experiment, found)
    found.problems += _adapter_problems(file, experiment, found.model)
    found.problems += _context_problems(experiment, found)
    _look_for_overlap(found)
    if for_cluster is None:
        found.warnings += filter(None, [slow_precision(experiment)])
    found.problems += _run_folder_problems(file, experiment)
    if found.model is not None:
        found.plan = make_plan(
            experiment,
            found.model,
            prompt_tokens=_typical_tokens(found.train),
            num_held_out=len(found.held_out.data.prompts) if found.held_out else 0,
        )
        _compare_disk(found, found.plan, experiment.run.root)
        if for_cluster is None:
            _compare_memory(found, found.plan)
    return found


def machine_problems(experiment: ExperimentConfig) -> list[str]:
    """What this machine lacks to carry out a run; a login node may lack it all."""
    packages = [
        *RUN_PACKAGES,
        *(["vllm"] if experiment.rollout.engine == "vllm" else []),
        *(["peft"] if experiment.trainer.lora is not None else []),
    ]
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    problems = [f"{', '.join(missing)} cannot be imported by {sys.executable}: bash env/setup.sh"] if missing else []
    if shutil.which("mpirun") is None and not Path(sys.executable).with_name("mpirun").is_file():
        problems.append("mpirun is neither on the PATH nor beside Python: bash env/setup.sh installs Open MPI")
    local = experiment.local
    try:
        assign_gpus(visible_gpus(), trainer_ranks=local.trainer_ranks, engines=local.engines)
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


def _read_prompts(found: Findings, key: str, config: DataConfig) -> Prompts | None:
    """Read the dataset; rows that make no prompt are a problem, the others are looked at all the same."""
    try:
        data = survey_prompts(config)
    except InputError as error:
        found.problems.append(f"{key}: {error}")
        return None
    if data.report.num_rejected:
        rejected = data.report.rejected
        more = data.report.num_rejected - len(rejected)
        lines = [f"{key}: {data.report.num_rejected} of {_num_source_rows(data)} rows cannot be used", *rejected]
        found.problems.append("\n  ".join([*lines, *([f"and {more} more"] if more else [])]))
    return Prompts(key=key, data=data, chat=config.chat)


def _tokenize(found: Findings, model: Path, tokenizer: Tokenizer) -> None:
    """All datasets at once: starting the tokenizer takes longer than using it."""
    datasets = [prompts for prompts in (found.train, found.held_out) if prompts is not None]
    if found.model is None or not datasets:
        return
    if tokenizer is tokenize and not can_tokenize():
        found.warnings.append("tokens of the prompts were not counted: transformers is not installed here")
        return
    texts = [([prompt.text for prompt in prompts.data.prompts], prompts.chat) for prompts in datasets]
    for prompts, tokenized in zip(datasets, found.attempt(lambda: tokenizer(model, texts)) or [], strict=False):
        prompts.tokens, prompts.rendered = tuple(tokenized.counts), tuple(tokenized.rendered)


def _num_source_rows(data: PromptDataset) -> int:
    return data.report.num_rows + data.report.num_rejected


def _schedule_problems(file: ExperimentFile, experiment: ExperimentConfig, found: Findings) -> Iterator[str]:
    if found.train is None:
        return
    wanted, key = experiment.rollout.prompts_per_step, "rollout.prompts_per_step"
    waves, waves_key = experiment.rollout.max_waves, "rollout.max_waves"
    rows = len(found.train.data.prompts)
    if wanted > rows:
        yield (
            f"{file.where(key)}: {key} ({wanted}) must be at most the {rows} rows of data.train: "
            "a step never holds a prompt twice."
        )
    elif waves * wanted > rows:
        yield (
            f"{file.where(waves_key)}: {waves_key} ({waves}) must be at most {rows // wanted}, as often as {wanted} "
            f"prompts go into the {rows} rows of data.train: a step never holds a prompt twice."
        )


def _adapter_problems(file: ExperimentFile, experiment: ExperimentConfig, model: ModelSizes | None) -> Iterator[str]:
    key, lora = "trainer.lora.target_modules", experiment.trainer.lora
    if model is None or lora is None:
        return
    for target in model.unknown_targets(lora):
        yield (
            f'{file.where(key)}: {key}: "{target}" names no layer of policy.model {experiment.policy.model}; its '
            f"layers are: {', '.join(model.layer_names) or 'none that can have an adapter'}."
        )


def context_limit(experiment: ExperimentConfig, model: ModelSizes | None) -> tuple[int, str] | None:
    """Tokens that prompt and completion may have together, and what says so."""
    limits = [(experiment.rollout.max_context_tokens, "rollout.max_context_tokens")]
    if model is not None:
        limits.append((model.max_positions, "max_position_embeddings of the model"))
    known = [(tokens, name) for tokens, name in limits if tokens is not None]
    return min(known) if known else None


def _context_problems(experiment: ExperimentConfig, found: Findings) -> Iterator[str]:
    limit = context_limit(experiment, found.model)
    completion = experiment.rollout.max_completion_tokens
    for prompts in (found.train, found.held_out):
        if limit is None or prompts is None or prompts.tokens is None:
            continue
        allowed, name = limit
        num_too_long = sum(tokens + completion > allowed for tokens in prompts.tokens)
        if num_too_long == 0:
            continue
        tokens, row = max((tokens, row) for row, tokens in enumerate(prompts.tokens))
        others = f" ({num_too_long} rows are too long; this is the longest)" if num_too_long > 1 else ""
        yield (
            f"{prompts.key}: row {row} (from 0) has {tokens} tokens, and {completion} of completion make "
            f"{tokens + completion}; {name} allows {allowed}{others}.\n"
            f'  the prompt begins "{_beginning(prompts.data.prompts[row].text)}". Shorten or remove it, or lower '
            "rollout.max_completion_tokens."
        )


def _beginning(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}…"


def _read_golds(found: Findings, experiment: ExperimentConfig) -> None:
    """A failed score is left out of the loss; where more fail than scoring.max_failed, the run would stop."""
    if found.train is None:
        return
    for unreadable in unreadable_golds(experiment.rewards, found.train.data.prompts):
        told = found.problems if unreadable.share > experiment.scoring.max_failed else found.warnings
        told.append(f"data: {unreadable}")


def _try_sandbox(found: Findings, experiment: ExperimentConfig, cluster: str | None) -> None:
    """Where programs cannot be shut in, a run ends when its scorers start; on a cluster its nodes decide."""
    parts = [reward for reward in experiment.rewards if reward.use == CODE_TESTS]
    if not parts:
        return
    try:
        found.isolation = try_sandbox(allow_unsandboxed=all(reward.allow_unsandboxed for reward in parts))
    except InputError as error:
        if cluster is None:
            found.problems.append(f"rewards: {CODE_TESTS}: {error}")
        else:
            found.warnings.append(f"rewards: {CODE_TESTS}: if {cluster}'s nodes are as this one, the run ends: {error}")
    if found.isolation is not None and not found.isolation.is_whole:
        found.warnings.append(
            f"rewards: allow_unsandboxed: programs that the model writes run with {found.isolation} only, and can do "
            f"here what you can: {', '.join(found.isolation.failures)}"
        )


def _look_for_overlap(found: Findings) -> None:
    """Held-out prompts that are trained on say nothing about what was learned."""
    if found.train is None or found.held_out is None:
        return
    trained = {prompt.text for prompt in found.train.data.prompts}
    held_out = found.held_out.data.prompts
    shared = [prompt for prompt in held_out if prompt.text in trained]
    if not shared:
        return
    text = (
        f"evaluation.data: {len(shared)} of {len(held_out)} held-out prompts are also in data.train, such as "
        f'"{_beginning(shared[0].text)}"'
    )
    if len(shared) == len(held_out):
        found.problems.append(f"{text}: an evaluation on them measures memory. Hold prompts out of the training data.")
    else:
        found.warnings.append(f"{text}; the accuracy will be too high by what is remembered")


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


def _typical_tokens(prompts: Prompts | None) -> int:
    if prompts is None:
        return 0
    if prompts.tokens is None:
        return prompts.data.report.prompt_chars_p50 // 3
    return sorted(prompts.tokens)[len(prompts.tokens) // 2]


def _compare_disk(found: Findings, plan: Plan, root: Path) -> None:
    free = free_bytes(root)
    if plan.disk > free:
        found.problems.append(
            f"run.root {root} has {size_text(free)} free and the run needs up to {size_text(plan.disk)}: "
            f"{plan.kept_checkpoints} checkpoints of {size_text(plan.checkpoint)} and "
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
