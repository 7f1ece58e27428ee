"""What a user reads when an experiment file is wrong, and how values, paths and overrides are understood."""

from pathlib import Path

import pytest

from towline.jobs.experiment import GrpoExperiment
from towline.jobs.experiment_errors import key_lines
from towline.jobs.load_experiment import load_experiment, override_experiment
from towline.rollout.rewards.config import Convergence
from towline.storage.errors import ConfigError

EXPERIMENT = """\
objective = "grpo"
steps = 3

[policy]
model = "model"

[data]
train = "train.jsonl"

[rollout]
prompts_per_step = 2
max_completion_tokens = 4

[[rewards]]
use = "exact_match"
weight = 1.0

[trainer]
learning_rate = 1e-4
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(EXPERIMENT)
    return path


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def refusal(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_experiment(file, overrides)
    assert refused.value.exit_code == 2
    return str(refused.value)


@pytest.mark.parametrize("home", ["on_device", "offloaded", "int8"])
def test_the_reference_has_three_homes(file: Path, home: str) -> None:
    assert load_experiment(file, (f"policy.reference={home}",)).policy.reference == home


def test_an_int8_reference_and_zero_3_are_refused_unless_none_is_loaded(file: Path) -> None:
    overrides = ("policy.reference=int8", "trainer.zero_stage=3")
    message = refusal(file, *overrides)
    assert 'policy.reference = "int8" does not go with trainer.zero_stage = 3' in message
    assert 'set policy.reference = "offloaded"' in message
    assert load_experiment(file, (*overrides, "trainer.kl_beta=0.0")).policy.reference == "int8"


@pytest.mark.parametrize("home", ["offloaded", "int8"])
def test_adapters_and_a_home_of_the_reference_are_refused_unless_there_is_none(file: Path, home: str) -> None:
    overrides = (f"policy.reference={home}", "trainer.lora.rank=8")
    message = refusal(file, *overrides)
    assert f'policy.reference = "{home}" does not go with [trainer.lora]' in message
    assert "Leave policy.reference out" in message
    experiment = load_experiment(file, (*overrides, "trainer.kl_beta=0.0"))
    assert experiment.trainer.lora is not None
    assert (experiment.trainer.lora.rank, experiment.trainer.lora.target_modules) == (8, None)


def test_a_reference_refreshed_every_step_is_refused_with_the_reason(file: Path) -> None:
    message = refusal(file, "trainer.reference_every=1")
    assert "trainer.reference_every" in message
    assert "their KL would always begin at 0" in message
    assert "greater than or equal to 2" in refusal(file, "trainer.reference_every=0")


@pytest.mark.parametrize(("step", "version"), [(0, None), (199, None), (200, 200), (201, 200), (399, 200), (400, 400)])
def test_a_reference_is_the_policy_of_the_last_refresh(file: Path, step: int, version: int | None) -> None:
    trainer = load_experiment(file, ("trainer.reference_every=200",)).trainer
    assert trainer.last_refresh(step) == version


@pytest.mark.parametrize("overrides", [(), ("trainer.reference_every=2", "trainer.kl_beta=0.0")])
def test_without_refreshes_or_without_a_kl_term_none_is_refreshed(file: Path, overrides: tuple[str, ...]) -> None:
    trainer = load_experiment(file, overrides).trainer
    assert [trainer.last_refresh(step) for step in (0, 2, 200)] == [None] * 3


def test_a_sound_file_loads_with_its_defaults(file: Path) -> None:
    experiment = load_experiment(file)
    assert (experiment.steps, experiment.seed, experiment.rollout.group_size) == (3, 0, 8)
    assert experiment.evaluation is None


def test_the_resolved_experiment_survives_the_way_through_its_json(file: Path) -> None:
    experiment = load_experiment(file)
    assert GrpoExperiment.model_validate_json(experiment.model_dump_json()) == experiment


def test_unknown_key_is_named_with_its_line_and_the_nearest_field(file: Path) -> None:
    change(file, "prompts_per_step = 2", "prompts_per_step = 2\ngroup_sise = 4")
    assert refusal(file) == "small.toml:12: rollout.group_sise is not a field. Did you mean group_size?"


def test_unknown_key_far_from_any_field_lists_the_fields(file: Path) -> None:
    change(file, "steps = 3", "steps = 3\nxyzzy = 1")
    found = refusal(file)
    assert found.startswith("small.toml:3: xyzzy is not a field. Fields here: seed, steps,")


def test_unknown_key_in_an_array_of_tables(file: Path) -> None:
    change(file, "weight = 1.0", "weigth = 1.0\nweight = 1.0")
    first = refusal(file).splitlines()[0]
    assert first == "small.toml:16: rewards.0.weigth is not a field. Did you mean weight?"


def test_missing_field_is_named_with_its_table_and_meaning(file: Path) -> None:
    change(file, "learning_rate = 1e-4", "")
    assert refusal(file) == "small.toml:18: trainer.learning_rate is missing. Peak learning rate of AdamW."


def test_missing_table(file: Path) -> None:
    change(file, "[trainer]\nlearning_rate = 1e-4\n", "")
    assert "trainer is missing" in refusal(file)


def test_all_problems_are_told_at_once(file: Path) -> None:
    change(file, "steps = 3", "steps = 0")
    change(file, "prompts_per_step = 2", 'prompts_per_step = "2"')
    found = refusal(file).splitlines()
    assert len(found) == 2
    assert found[0].startswith("small.toml:2: steps: ")
    assert found[1].startswith("small.toml:11: rollout.prompts_per_step: ")
    assert "(found '2')" in found[1]


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("trainer.kl_estimator=k1", "k1 in the loss has an expected gradient of zero"),
        ("rollout.group_size=1", "a group of 1 has no other completion to compare with"),
        ("rollout.top_p=0.9", "top_p = 0.9 cuts the distribution that is sampled from"),
        ("rollout.top_k=50", "top_k = 50 cuts the distribution"),
        ("rollout.min_p=0.1", "min_p = 0.1 cuts the distribution"),
        ("trainer.kl_beta=-0.1", "trainer.kl_beta: Input should be greater than or equal to 0 (found -0.1)"),
        ("trainer.minibatches=3", "trainer.minibatches (3) must not exceed rollout.prompts_per_step (2)"),
        ("trainer.reward_beta=1", "trainer.reward_beta is not a field"),
        ("rollout.temperature=0", "rollout.temperature: Input should be greater than 0"),
        ("run.name=../elsewhere", "run.name: "),
    ],
)
def test_values_that_would_spoil_the_training_are_refused_with_the_reason(
    file: Path, override: str, reason: str
) -> None:
    assert reason in refusal(file, override)


def test_not_toml_at_all(file: Path) -> None:
    file.write_text('objective = "grpo"\nsteps = \n')
    assert refusal(file) == "small.toml:2: not valid TOML: Invalid value."


def test_missing_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.toml") == f"{tmp_path / 'none.toml'}: No such file or directory."


def test_overrides_have_the_types_of_toml_and_a_bare_word_is_a_string(file: Path) -> None:
    experiment = load_experiment(
        file,
        (
            "steps=7",
            "trainer.learning_rate = 1e-6",
            "trainer.gradient_checkpointing=true",
            "rollout.precision=float32",
            'run.name="quoted"',
            "trainer.adam_betas=[0.8, 0.9]",
            "evaluation.data={ train = 'held_out.jsonl' }",
        ),
    )
    assert experiment.steps == 7
    assert experiment.trainer.learning_rate == 1e-6
    assert experiment.trainer.gradient_checkpointing is True
    assert experiment.rollout.precision == "float32"
    assert experiment.run.name == "quoted"
    assert experiment.trainer.adam_betas == (0.8, 0.9)
    assert experiment.evaluation is not None


def test_the_last_of_two_overrides_counts(file: Path) -> None:
    assert load_experiment(file, ("steps=4", "steps=5")).steps == 5


def test_a_wrong_override_is_said_to_come_from_the_command_line(file: Path) -> None:
    assert refusal(file, "rollout.group_sise=4") == "-o: rollout.group_sise is not a field. Did you mean group_size?"
    assert refusal(file, "steps=four").startswith("-o: steps: ")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "-o steps: expected KEY=VALUE"),
        ("=3", "-o =3: expected KEY=VALUE"),
        ("steps.more=3", "-o steps.more=3: steps is not a table."),
    ],
)
def test_malformed_override(file: Path, override: str, message: str) -> None:
    assert refusal(file, override).startswith(message)


def test_paths_are_relative_to_the_file(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    change(file, 'train = "train.jsonl"', 'train = "../train.jsonl"\ntemplate = "prompts/a.txt"')
    experiment = load_experiment(file)
    assert experiment.policy.model == str(tmp_path / "model")
    assert experiment.data.train == str(tmp_path.parent / "train.jsonl")
    assert experiment.data.template == tmp_path / "prompts/a.txt"


def test_paths_of_overrides_and_the_run_root_are_relative_to_the_working_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    experiment = load_experiment(file, ("policy.model=other",))
    assert experiment.policy.model == str(tmp_path / "here/other")
    assert experiment.run.root == tmp_path / "here/runs"
    assert load_experiment(file, ("run.root=there",)).run.root == tmp_path / "here/there"


def test_a_procedural_task_is_not_a_path(file: Path) -> None:
    experiment = load_experiment(file, ("data.train=reasoning_gym:leg_counting", "data.size=5"))
    assert experiment.data.train == "reasoning_gym:leg_counting"


def test_variables_are_expanded_in_paths(file: Path) -> None:
    change(file, 'model = "model"', 'model = "${MODELS}/small"')
    assert load_experiment(file, variables={"MODELS": "/shelf"}).policy.model == "/shelf/small"


def test_an_unknown_variable_is_named_with_those_there_are(file: Path) -> None:
    change(file, 'model = "model"', 'model = "${MODELS}/small"')
    with pytest.raises(ConfigError, match=r"small.toml:5: .*\$\{MODELS\} is not a variable .*\(known: HOME_OF_ALL\)"):
        load_experiment(file, variables={"HOME_OF_ALL": "/"})


DETERMINISTIC = ("deterministic=true", "rollout.precision=float32", "trainer.precision=float32")


def test_determinism_is_off_unless_it_is_asked_for(file: Path) -> None:
    assert not load_experiment(file).deterministic
    assert load_experiment(file, DETERMINISTIC).deterministic


@pytest.mark.parametrize(
    ("override", "needed", "found"),
    [
        ("rollout.max_staleness=1", "rollout.max_staleness = 0", "1"),
        ("rollout.precision=bfloat16", 'rollout.precision = "float32"', '"bfloat16"'),
        ("trainer.precision=bfloat16", 'trainer.precision = "float32"', '"bfloat16"'),
        ("local.trainer_threads=2", "local.trainer_threads = 1", "2"),
        ("local.engine_threads=2", "local.engine_threads = 1", "2"),
    ],
)
def test_what_makes_bits_depend_on_chance_is_refused_where_determinism_is_asked_for(
    file: Path, override: str, needed: str, found: str
) -> None:
    assert f"deterministic = true needs {needed}, found {found}" in refusal(file, *DETERMINISTIC, override)
    load_experiment(file, (*DETERMINISTIC, override, "deterministic=false"))


def test_limits_of_a_run_have_defaults_and_bounds(file: Path) -> None:
    run = load_experiment(file).run
    assert (run.stall_s, run.lease_s, run.max_restarts) == (600.0, 120.0, 3)
    assert load_experiment(file, ("run.max_restarts=0", "run.lease_s=0.5")).run.max_restarts == 0
    assert "run.max_restarts: " in refusal(file, "run.max_restarts=-1")
    assert "run.lease_s: " in refusal(file, "run.lease_s=0")


def test_a_resolved_experiment_can_be_changed(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = load_experiment(file)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert override_experiment(experiment, ()) == experiment
    changed = override_experiment(experiment, ("steps=9", "local.engines=2", "rollout.precision=float32"))
    assert (changed.steps, changed.local.engines, changed.rollout.precision) == (9, 2, "float32")
    unchanged = {"steps": experiment.steps, "local": experiment.local, "rollout": experiment.rollout}
    assert changed.model_copy(update=unchanged) == experiment


def test_a_path_in_a_change_is_relative_to_the_working_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = load_experiment(file)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert override_experiment(experiment, ("policy.model=other",)).policy.model == str(tmp_path / "elsewhere/other")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=0", "-o: steps: "),
        ("stepps=4", "-o: stepps is not a field. Did you mean steps?"),
        ("steps", "-o steps: expected KEY=VALUE"),
        ("trainer.minibatches=3", "trainer.minibatches (3) must not exceed rollout.prompts_per_step (2)"),
    ],
)
def test_a_wrong_change_is_refused_as_it_is_for_a_file(file: Path, override: str, message: str) -> None:
    experiment = load_experiment(file)
    with pytest.raises(ConfigError) as refused:
        override_experiment(experiment, (override,))
    assert message in str(refused.value)


def test_key_lines_finds_tables_arrays_and_dotted_keys() -> None:
    text = "\n".join(
        ["a = 1", "# b = 2", "[c]", "d = 3", "e.f = 4", "[[g]]", "h = 5", "[[g]]", "h = 6", "[c.i]", "j = 7"]
    )
    assert key_lines(text) == {
        "a": 1, "c": 3, "c.d": 4, "c.e.f": 5, "g.0": 6, "g.0.h": 7, "g.1": 8, "g.1.h": 9, "c.i": 10, "c.i.j": 11,
    }  # fmt: skip


def test_a_chunk_is_what_divides_a_step_over_twice_the_engines(file: Path) -> None:
    assert load_experiment(file, ("rollout.prompts_per_step=32", "local.engines=2")).chunk_prompts == 8
    assert load_experiment(file, ("rollout.prompts_per_step=2", "local.engines=4")).chunk_prompts == 1
    assert load_experiment(file, ("rollout.chunk_prompts=5",)).chunk_prompts == 5


def test_two_rewards_of_one_name_are_refused(file: Path) -> None:
    file.write_text(file.read_text() + '\n[[rewards]]\nuse = "exact_match"\nweight = 0.5\n')
    assert "two rewards are called exact_match; give one of them another `name`" in refusal(file)


OVERLONG = '{use="overlong",weight=1.0,cache_tokens=2}'


def rewards(*tables: str) -> str:
    return f"rewards=[{','.join(tables)}]"


def test_the_overlong_penalty_stands_beside_a_reward(file: Path) -> None:
    experiment = load_experiment(file, (rewards('{use="exact_match",weight=1.0}', OVERLONG),))
    assert [reward.part_name for reward in experiment.rewards] == ["exact_match", "overlong"]
    assert GrpoExperiment.model_validate_json(experiment.model_dump_json()) == experiment


@pytest.mark.parametrize(
    ("tables", "overrides", "message"),
    [
        (
            [OVERLONG.replace("2", "5")],
            (),
            "cache_tokens (5) of overlong must be at most rollout.max_completion_tokens (4)",
        ),
        ([OVERLONG], ("trainer.masks_truncated=true",), "leaves out the very completions that the reward overlong"),
        ([OVERLONG.replace(",cache_tokens=2", "")], (), 'use = "overlong" needs cache_tokens'),
    ],
)
def test_an_overlong_penalty_without_effect_is_refused(
    file: Path, tables: list[str], overrides: tuple[str, ...], message: str
) -> None:
    assert message in refusal(file, rewards('{use="exact_match",weight=1.0}', *tables), *overrides)


def test_length_stands_beside_a_reward_if_completions_can_be_longer_than_its_target(file: Path) -> None:
    table = (
        '{use="length",weight=0.2,target_tokens=3,when={exact_match=1.0},converged={min_reward=0.9,window=5,'
        "tolerance=0.05}}"
    )
    experiment = load_experiment(file, (rewards('{use="exact_match",weight=1.0}', table),))
    assert experiment.rewards[1].converged == Convergence(min_reward=0.9, window=5, tolerance=0.05)
    assert GrpoExperiment.model_validate_json(experiment.model_dump_json()) == experiment
    message = refusal(file, rewards('{use="exact_match",weight=1.0}', table.replace("tokens=3", "tokens=4")))
    assert "target_tokens (4) of length must be below rollout.max_completion_tokens (4)" in message


def test_rewards_that_do_not_go_together_are_refused(file: Path) -> None:
    message = refusal(file, rewards('{use="exact_match",weight=1.0,when={format=1.0}}'))
    assert message == (
        "small.toml:1: rewards: exact_match counts when format, which is no part; there are: exact_match."
    )


def test_an_overlong_penalty_alone_is_refused(file: Path) -> None:
    assert "overlong alone teaches to say nothing" in refusal(file, rewards(OVERLONG))


def test_an_overlong_penalty_of_weight_0_is_recorded_beside_masked_completions(file: Path) -> None:
    tables = rewards('{use="exact_match",weight=1.0}', OVERLONG.replace("1.0", "0.0"))
    assert load_experiment(file, (tables, "trainer.masks_truncated=true")).rewards[1].weight == 0


def test_dapo_is_accepted_as_its_row_has_it(file: Path) -> None:
    row = ("trainer.clip_high=0.28", "trainer.kl_beta=0.0", "rollout.max_waves=3")
    experiment = load_experiment(file, (rewards('{use="exact_match",weight=1.0}', OVERLONG), *row))
    assert (experiment.trainer.clip_high, experiment.rollout.max_waves) == (0.28, 3)


def test_one_wave_is_the_default_and_none_is_no_number_of_waves(file: Path) -> None:
    assert load_experiment(file).rollout.max_waves == 1
    assert "rollout.max_waves: " in refusal(file, "rollout.max_waves=0")


def test_waves_and_a_baseline_over_the_step_are_refused(file: Path) -> None:
    batch = ("trainer.baseline=batch", "trainer.scale=batch_std")
    message = refusal(file, "rollout.max_waves=2", *batch)
    assert "rollout.max_waves = 2 leaves out groups of equal rewards" in message
    assert 'Set baseline = "group" or max_waves = 1' in message
    load_experiment(file, batch)
    load_experiment(file, ("rollout.max_waves=2", "trainer.scale=batch_std"))


def test_a_wrong_reward_is_reported_once(file: Path) -> None:
    change(file, "weight = 1.0", "wieght = 1.0")
    lines = refusal(file).splitlines()
    assert any("rewards.0.wieght is not a field. Did you mean weight?" in line for line in lines)
    assert not any("at least 1 item" in line for line in lines)


def test_the_path_of_a_users_own_reward_is_relative_to_the_file(file: Path) -> None:
    change(file, '"exact_match"', '"mine/grade.py:grade"')
    assert load_experiment(file).rewards[0].use == f"{file.parent}/mine/grade.py:grade"


def test_a_file_that_is_not_utf8_names_its_line(file: Path) -> None:
    file.write_bytes(b'objective = "grpo"\nsteps = 3 # \xff\n')
    assert refusal(file).startswith(f"{file}:2: not UTF-8")
