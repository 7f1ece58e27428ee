"""`towline resume`: go on with a run where it stopped, with the same experiment or with harmless changes to it."""

from typing import Any, cast

from rich.console import Console

from towline.jobs.experiment import ExperimentConfig
from towline.jobs.load_experiment import override_experiment, recorded_experiment
from towline.jobs.slurm.attempts import MIN_LEFT_S, AttemptBook
from towline.launcher.environment import describe_environment
from towline.launcher.preflight import machine_problems, raise_problems
from towline.launcher.run import carry_out, refuse_login_node
from towline.launcher.run_job import live_jobs
from towline.launcher.several_runs import runs_of
from towline.launcher.submit import announce, prepare_again, submit_prepared
from towline.storage.dataset_files import shown
from towline.storage.errors import InputError, RunFolderError
from towline.storage.run_directory import RunDirectory, is_locked, write_json

PARTS = {
    "run.name": "the folder",
    "run.root": "the folder",
    "objective": "the objective",
    "seed": "the seed of prompts and sampling",
    "policy": "policy and reference",
    "data": "the data cursor",
    "rollout.prompts_per_step": "the data cursor",
    "rollout.precision": "the weight stream",
    "trainer.kl_beta": "the KL coefficient",
    "trainer.zero_stage": "the optimiser state",
    "trainer.precision": "the optimiser state",
    "trainer.adam_betas": "the optimiser state",
    "trainer.weight_decay": "the optimiser state",
}
"""What a run is: fields that a resume may not change, and what would be lost or reset by it."""


def resume_run(run: RunDirectory, overrides: tuple[str, ...]) -> int:
    """Carry out one more attempt here, or hand a further job to Slurm if the run was submitted to it.

    Raises:
        InputError: the run is in use, nothing is left to do, or a change would reset a part of it; nothing was started.
        RunFault: a process of the run failed.
        SlurmError: sbatch refused.
    """
    if run.cluster.is_file():
        return _submit_again(RunDirectory(run.root.absolute()), overrides)
    refuse_login_node(run.root, verb="resume")
    before, experiment = _changed(run, overrides)
    raise_problems(machine_problems(experiment))
    if experiment != before:
        write_json(run.config, experiment.model_dump(mode="json"))
    write_json(run.environment, describe_environment(overrides))
    console = Console(highlight=False)
    return carry_out(run, experiment, console)


def _submit_again(run: RunDirectory, overrides: tuple[str, ...]) -> int:
    if jobs := live_jobs(run):
        raise RunFolderError(
            f"{run.root.name} has a job that waits or runs: {', '.join(map(str, jobs))}. Nothing was submitted. See "
            f"towline status {shown(run.root)}; towline cancel {shown(run.root)} ends it."
        )
    _, experiment = _changed(run, overrides)
    _refuse_without_budget(run, experiment)
    prepared = prepare_again(run, experiment)
    write_json(run.environment, describe_environment(overrides))
    for line in prepared.notes:
        print(line)
    return announce(prepared, submit_prepared(prepared))


def _changed(run: RunDirectory, overrides: tuple[str, ...]) -> tuple[ExperimentConfig, ExperimentConfig]:
    """The experiment as the run has it, and as it is to go on; nothing of the run is changed."""
    if is_locked(run):  # its processes read the experiment whenever they start again
        raise RunFolderError(f"run folder {run.root} is in use by another supervisor. Nothing was changed.")
    before = recorded_experiment(run.config.read_text())
    experiment = override_experiment(before, overrides)
    _refuse_resets(run, before, experiment)
    if len(runs_of(run.root, experiment)) > 1:
        raise InputError(
            f"{run.root.name} is one run and cannot go on as several: leave sweep and watcher out, or start a new run. "
            "Nothing was started."
        )
    state = run.read_state()
    if state.get("status") == "done" and experiment.steps <= state["next_step"]:
        raise InputError(
            f"{run.root.name} is done: {state['next_step']} of {experiment.steps} steps. To train on, give it more: "
            f"towline resume {run.root} -o steps={2 * experiment.steps}"
        )
    return before, experiment


def _refuse_without_budget(run: RunDirectory, experiment: ExperimentConfig) -> None:
    nodes = experiment.nodes
    used, most = AttemptBook(run).node_hours(), nodes.max_node_hours if nodes else None
    num_nodes = sum(nodes.counts.values()) if nodes else 1
    left_s = AttemptBook(run).left_s(most, num_nodes)
    if left_s is not None and left_s < MIN_LEFT_S:
        raise InputError(
            f"{run.root.name} has used {used:.3g} node-hours and nodes.max_node_hours is {most:g}: the job would end "
            f"at once. Nothing was submitted. More: towline resume {shown(run.root)} -o nodes.max_node_hours=HOURS"
        )


def _refuse_resets(run: RunDirectory, before: ExperimentConfig, after: ExperimentConfig) -> None:
    old, new = _flat(before.model_dump(mode="json")), _flat(after.model_dump(mode="json"))
    for name in sorted(old.keys() | new.keys()):
        part = next((PARTS[key] for key in PARTS if name == key or name.startswith(f"{key}.")), None)
        if part is not None and old.get(name) != new.get(name):
            raise InputError(
                f"{run.root.name} cannot go on with {name} = {new.get(name)}: {part} would not be that of the run, "
                f"which has {old.get(name)}. Leave it, or start a new run. Nothing was started."
            )


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{prefix}{key}"
        flat |= _flat(cast(dict[str, Any], inner), f"{name}.") if isinstance(inner, dict) else {name: inner}
    return flat
