"""`towline check`: what an experiment will do and need, and everything that is wrong with it, before it starts."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil

from towline.jobs.experiment import ExperimentConfig, RolloutExperiment
from towline.launcher.example_lines import example_lines, half_lines
from towline.launcher.experiment_file import read_experiment
from towline.launcher.findings import Findings, Prompts
from towline.launcher.on_cluster import read_on_cluster
from towline.launcher.plan import Plan, size_text
from towline.launcher.preflight import free_bytes, has_gpu, preflight
from towline.launcher.text import printable
from towline.launcher.tokenized_prompts import NUM_RENDERED
from towline.rollout.rewards.config import Convergence, RewardConfig
from towline.rollout.rewards.formula import formula
from towline.rollout.rewards.token_penalty import TokenPenalty
from towline.storage.dataset_files import shown

BAD_INPUT = 2
MAX_ANSWER_CHARS = 200


def check_experiment(path: Path, overrides: tuple[str, ...], cluster: str | None = None) -> int:
    """Print the report; return 2 when something is wrong.

    Args:
        cluster: name or file of the profile that it will be submitted with; None: it will run on this machine.
    """
    if cluster is None:
        file, experiment = read_experiment(path, overrides)
        found = preflight(file, experiment)
        lines = report_lines(experiment, found)
    else:
        job = read_on_cluster(path, cluster, overrides)
        found = job.look()
        lines = report_lines(job.experiment, found, job.job_lines())
    print("\n".join(lines))
    return BAD_INPUT if found.problems else 0


def report_lines(experiment: ExperimentConfig, found: Findings, job: Sequence[str] = ()) -> Iterator[str]:
    """
    Args:
        job: layout, cost and limit of a job on a cluster.
    """
    yield from _model_lines(experiment, found)
    for prompts in (found.train, found.held_out):
        if prompts is not None:
            yield from _data_lines(prompts)
    if isinstance(experiment, RolloutExperiment):
        yield from _reward_lines(experiment.rewards, experiment.rollout.max_completion_tokens)
    for examples in (found.train_examples, found.held_out_examples):
        if examples is not None:
            name = "train" if examples.key == "data" else "held out"
            yield from example_lines(name, examples.data, examples.tokenized, examples.overlong)
    yield from half_lines(found.halves)
    if found.isolation is not None:
        yield f"        programs run behind {found.isolation} on this machine, which was tried"
    if found.plan is not None:
        yield from plan_lines(found.plan, experiment, on_cluster=bool(job))
    yield from job
    for warning in found.warnings:
        yield f"! {warning}"
    for problem in found.problems:
        yield f"FAILED  {problem}"
    yield _verdict(found)


def _model_lines(experiment: ExperimentConfig, found: Findings) -> Iterator[str]:
    if found.model is not None:
        sizes = found.model
        limit = "" if sizes.max_positions is None else f", context {sizes.max_positions:,} tokens"
        yield (
            f"model   {shown(Path(experiment.policy.model))}   {sizes.num_parameters:,} parameters, "
            f"{sizes.num_layers} layers{limit}"
        )


def _data_lines(prompts: Prompts) -> Iterator[str]:
    report, name = prompts.data.report, "train" if prompts.key == "data" else "held out"
    yield (
        f"data    {name}   {report.num_rows:,} prompts, {report.num_duplicates:,} of them again, "
        f"{report.num_rejected:,} rows rejected   {_source(prompts)}"
    )
    yield f"        {_lengths(prompts)}"
    first = prompts.data.prompts[:NUM_RENDERED]
    for prompt, text in zip(first, prompts.rendered or [prompt.text for prompt in first], strict=True):
        yield f"        row {prompt.row}, answer {_beginning(printable(prompt.answer))}"
        yield from (f"          | {printable(line)}" for line in text.split("\n"))
    if prompts.chat and not prompts.rendered:
        yield "        each as one user turn of the model's chat template"


def _beginning(answer: str) -> str:
    """The tests of a program are an answer of many lines."""
    return answer if len(answer) <= MAX_ANSWER_CHARS else f"{answer[:MAX_ANSWER_CHARS]}… ({len(answer):,} characters)"


def _source(prompts: Prompts) -> str:
    source = prompts.data.source
    return shown(Path(source)) if Path(source).is_absolute() else source


def _lengths(prompts: Prompts) -> str:
    report = prompts.data.report
    if prompts.tokens is None:
        unit, lengths = "characters", (report.prompt_chars_p50, report.prompt_chars_p95, report.prompt_chars_max)
    else:
        unit, lengths = "tokens", np.quantile(prompts.tokens, [0.5, 0.95, 1.0], method="inverted_cdf")
    return f"{unit}: {lengths[0]:.0f} median, {lengths[1]:.0f} p95, {lengths[2]:.0f} max"


def _reward_lines(rewards: tuple[RewardConfig, ...], max_completion_tokens: int) -> Iterator[str]:
    """The whole, and what it does not say of a part."""
    yield f"reward  {formula(rewards)}"
    for reward in rewards:
        script, colon, function = reward.use.rpartition(":")
        use = f"{shown(Path(script))}:{function}" if colon else reward.use
        more = [use] if use != reward.part_name else []
        penalty = TokenPenalty.of(reward, max_completion_tokens)
        if penalty is not None:
            more.append(f"0 up to {penalty.free_tokens:,} tokens, -1 at {max_completion_tokens:,}")
        if reward.model is not None:
            more.append(shown(reward.model))
        if reward.converged is not None:
            more.append(_convergence_text(reward.converged))
        if more:
            yield f"        {reward.part_name}   {'   '.join(more)}"


def _convergence_text(rule: Convergence) -> str:
    return (
        f"counts once {rule.window} steps have a mean reward of at least {rule.min_reward:g}, less than "
        f"{rule.tolerance:g} from that of the {rule.window} before"
    )


def plan_lines(plan: Plan, experiment: ExperimentConfig, *, on_cluster: bool = False) -> Iterator[str]:
    """What trainer, engines and disk need, each beside what there is."""
    yield from _trainer_lines(plan, experiment)
    if isinstance(experiment, RolloutExperiment):
        yield (
            f"        rollout {_times(plan.num_engines, 'engine')}   weights {size_text(plan.engine_weights)} + KV "
            f"cache {size_text(plan.kv_cache)} = {plan.kv_tokens:,} tokens of {plan.kv_bytes_per_token:,} B"
        )
    if plan.reward_models:
        yield f"        scorer  reward models {size_text(plan.reward_models)}"
    verdict = "not compared: this is not where it will run" if on_cluster else _memory_verdict(plan)
    yield f"        memory  ~{size_text(plan.memory)} in all   {verdict}"
    if isinstance(experiment, RolloutExperiment):
        yield _step_line(plan, experiment)
    free = free_bytes(experiment.run.root)
    shards = f"{plan.in_each_run}shards {size_text(plan.shards)}, " if plan.shards else plan.in_each_run
    yield (
        f"        disk    at most {size_text(plan.disk)}: {shards}{plan.kept_checkpoints} checkpoints of "
        f"{size_text(plan.checkpoint)}   {size_text(free)} free   {_fits(plan.disk <= free)}"
    )


def _trainer_lines(plan: Plan, experiment: ExperimentConfig) -> Iterator[str]:
    state, reference = plan.state, ""
    if plan.reference and isinstance(experiment, RolloutExperiment):
        place = {"on_device": "", "offloaded": " in main memory", "int8": " (int8)"}[experiment.policy.reference]
        reference = f" + reference {size_text(plan.reference)}{place}"
    yield (
        f"plan    trainer {_times(plan.num_ranks, 'rank')}   state {size_text(state.total)} a rank (weights "
        f"{size_text(state.weights)}, gradients {size_text(state.gradients)}, master {size_text(state.master)}, "
        f"moments {size_text(state.moments)}){reference} + activations ~{size_text(plan.activations)}"
    )
    if experiment.trainer.lora is not None:
        number = plan.num_adapter_parameters
        counted = "an unknown number (weights are pickles) of" if number is None else f"{number:,}"
        yield (
            f"        LoRA    {counted} parameters of rank {experiment.trainer.lora.rank} are trained beside "
            f"{plan.num_parameters:,} frozen ones"
        )


def _step_line(plan: Plan, experiment: RolloutExperiment) -> str:
    rollout, most = experiment.rollout, experiment.rollout.max_waves
    waves = f", in up to {most} waves, each after the other's scores: up to {most} times as long" if most > 1 else ""
    return (
        f"        step    {rollout.prompts_per_step} prompts of {rollout.group_size} completions{waves}   "
        f"log-probs at most {size_text(plan.logprobs_per_step)}, shards at most {size_text(plan.shards_per_step)}"
    )


def _memory_verdict(plan: Plan) -> str:
    if has_gpu():
        return "not compared: this machine has GPUs, whose memory the engines and the trainer share"
    available = psutil.virtual_memory().available
    return f"{size_text(available)} available   {_fits(plan.memory <= available)}"


def _fits(does: bool) -> str:
    return "fits" if does else "does not fit"


def _times(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _verdict(found: Findings) -> str:
    counts = [_times(len(found.problems), "problem"), _times(len(found.warnings), "warning")]
    return ", ".join(counts) if found.problems or found.warnings else "nothing wrong was found"
