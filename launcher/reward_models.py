"""Whether the reward models of an experiment can score what its policy writes. Reads their folders, loads nothing."""

from collections.abc import Iterator
from pathlib import Path

from towline.jobs.experiment import RolloutExperiment
from towline.launcher.experiment_file import ExperimentFile
from towline.launcher.findings import Findings
from towline.rollout.rewards.config import RewardConfig
from towline.storage.errors import InputError
from towline.storage.reward_folder import RewardFolder, ending_difference, read_reward_folder, tokenizer_problem


def look_at_reward_models(found: Findings, file: ExperimentFile, experiment: RolloutExperiment) -> None:
    """`found` has the policy and the prompts already."""
    for number, reward in enumerate(experiment.rewards):
        if reward.model is None:
            continue
        where = f"{file.where(f'rewards.{number}.model')}: rewards.model"
        policy = experiment.policy.folder
        try:
            folder = read_reward_folder(reward.model)
            problems = [*_misfits(found, experiment, reward, folder)]
            # What of the policy cannot be read is a problem of policy.model, and told there.
            if found.model is not None and (problem := tokenizer_problem(reward.model, policy)) is not None:
                problems.append(problem)
            elif found.model is not None and (word := ending_difference(reward.model, policy)) is not None:
                found.warnings.append(f"{where}: {word}")
        except InputError as error:
            problems = [str(error)]
        found.problems += [f"{where}: {problem}" for problem in problems]


def reward_model_bytes(experiment: RolloutExperiment) -> int:
    """Weights of all of them, in one scorer; 0 for a folder that is none."""
    folders = [reward.model for reward in experiment.rewards if reward.model is not None]
    return sum(_weight_bytes(folder) for folder in folders)


def _weight_bytes(folder: Path) -> int:
    try:
        return read_reward_folder(folder).weight_bytes
    except InputError:
        return 0


def _misfits(
    found: Findings, experiment: RolloutExperiment, reward: RewardConfig, folder: RewardFolder
) -> Iterator[str]:
    if found.model is not None and folder.vocabulary < found.model.vocabulary:
        yield (
            f"{reward.model} knows {folder.vocabulary:,} token ids and the policy writes {found.model.vocabulary:,} "
            "(vocab_size of config.json): train a reward model from the policy's own folder, or from one of its family."
        )
    if folder.max_positions is None or found.train is None or not found.train.tokens:
        return
    longest, completion = max(found.train.tokens), experiment.rollout.max_completion_tokens
    if longest + completion > folder.max_positions:
        yield (
            f"{reward.model} was made for {folder.max_positions:,} tokens (max_position_embeddings); the longest "
            f"prompt has {longest:,}, and with rollout.max_completion_tokens ({completion:,}) a text may have "
            f"{longest + completion:,}. Lower it, leave out long prompts, or take a model for longer texts."
        )
