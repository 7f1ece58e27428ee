"""What can be known of a run's prompts, rewards and lengths before it starts."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from towline.jobs.experiment import RolloutExperiment
from towline.launcher.experiment_file import ExperimentFile
from towline.launcher.findings import Findings, Prompts
from towline.launcher.model_folder import ModelSizes
from towline.launcher.plan import make_plan
from towline.launcher.reward_models import look_at_reward_models, reward_model_bytes
from towline.launcher.reward_source import located_problems
from towline.launcher.tokenized_prompts import Tokenized, can_tokenize, tokenize
from towline.launcher.unreadable_golds import unreadable_golds
from towline.rollout.rewards.config import CODE_TESTS
from towline.rollout.sandbox.sandbox import try_sandbox
from towline.storage.data_config import DataConfig
from towline.storage.datasets import PromptDataset, survey_prompts
from towline.storage.errors import InputError

Tokenizer = Callable[[Path, Sequence[tuple[Sequence[str], bool]]], list[Tokenized]]


def look_at_prompts(
    found: Findings, file: ExperimentFile, experiment: RolloutExperiment, tokenizer: Tokenizer, cluster: str | None
) -> None:
    """Datasets, rewards, and what they need together; `found` has the model already."""
    found.train = _read_prompts(found, "data", experiment.data)
    if experiment.evaluation is not None:
        found.held_out = _read_prompts(found, "evaluation.data", experiment.evaluation.data)
    _tokenize(found, experiment.policy.folder, tokenizer)
    found.problems += located_problems(file, experiment.rewards)
    _read_golds(found, experiment)
    _try_sandbox(found, experiment, cluster)
    found.problems += _schedule_problems(file, experiment, found)
    found.problems += _context_problems(experiment, found)
    _look_for_overlap(found)
    look_at_reward_models(found, file, experiment)
    if found.model is not None:
        found.plan = make_plan(
            experiment,
            found.model,
            prompt_tokens=_typical_tokens(found.train),
            num_held_out=len(found.held_out.data.prompts) if found.held_out else 0,
            reward_models=reward_model_bytes(experiment),
        )


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


def _schedule_problems(file: ExperimentFile, experiment: RolloutExperiment, found: Findings) -> Iterator[str]:
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


def context_limit(experiment: RolloutExperiment, model: ModelSizes | None) -> tuple[int, str] | None:
    """Tokens that prompt and completion may have together, and what says so."""
    limits = [(experiment.rollout.max_context_tokens, "rollout.max_context_tokens")]
    if model is not None:
        limits.append((model.max_positions, "max_position_embeddings of the model"))
    known = [(tokens, name) for tokens, name in limits if tokens is not None]
    return min(known) if known else None


def _context_problems(experiment: RolloutExperiment, found: Findings) -> Iterator[str]:
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


def _read_golds(found: Findings, experiment: RolloutExperiment) -> None:
    """A failed score is left out of the loss; where more fail than scoring.max_failed, the run would stop."""
    if found.train is None:
        return
    for unreadable in unreadable_golds(experiment.rewards, found.train.data.prompts):
        told = found.problems if unreadable.share > experiment.scoring.max_failed else found.warnings
        told.append(f"data: {unreadable}")


def _try_sandbox(found: Findings, experiment: RolloutExperiment, cluster: str | None) -> None:
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


def _typical_tokens(prompts: Prompts | None) -> int:
    if prompts is None:
        return 0
    if prompts.tokens is None:
        return prompts.data.report.prompt_chars_p50 // 3
    return sorted(prompts.tokens)[len(prompts.tokens) // 2]
