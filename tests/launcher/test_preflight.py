"""Every input that can be known to be bad is named, with its place and its remedy, before anything is made."""

import json
import os
from pathlib import Path

import pytest

from towline.launcher.cli import command
from towline.launcher.preflight import has_gpu, preflight
from towline.launcher.run import make_run
from towline.rollout.sandbox.isolation import Isolation, IsolationError
from towline.storage.run_directory import RunLock


def problem(project, *overrides: str) -> str:
    (found,) = project.look(*overrides).problems
    assert not project.runs.exists()
    return found


def test_a_sound_project_has_neither_problems_nor_warnings(project) -> None:
    found = project.look()
    assert (found.problems, found.warnings) == ([], [])
    assert found.train.tokens == (2, 2, 2)
    assert found.held_out.tokens == (2, 1)


def test_problems_stop_a_run_with_exit_code_2_before_anything_is_made(
    project, capsys: pytest.CaptureFixture[str]
) -> None:
    (project.model / "config.json").unlink()
    project.change('use = "exact_match"', 'use = "exact_mach"')
    before = sorted(project.folder.rglob("*"))
    assert command(["run", str(project.file)]) == 2
    printed = capsys.readouterr()
    assert "has no config.json" in printed.err
    assert "Did you mean exact_match?" in printed.err
    assert printed.out == ""
    assert sorted(project.folder.rglob("*")) == before


def test_missing_model_folder(project) -> None:
    project.change('model = "model"', 'model = "modell"')
    assert problem(project) == (
        f"policy.model {project.folder}/modell is not a folder; expected config.json, weights and a tokenizer in it."
    )


def test_hub_name_is_answered_with_the_command_that_downloads_it(project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.folder)
    project.change('model = "model"', 'model = "Qwen/Qwen2.5-7B"')
    assert problem(project).splitlines() == [
        'small.toml:5: policy.model "Qwen/Qwen2.5-7B" is a Hub name; a run takes its model from a folder and fetches '
        "nothing.",
        "  hf download Qwen/Qwen2.5-7B --local-dir models/Qwen2.5-7B",
        '  then model = "models/Qwen2.5-7B". Nothing was started.',
    ]


def test_hub_name_on_the_command_line(project) -> None:
    assert problem(project, "policy.model=Qwen/Qwen2.5-7B").startswith(
        '-o: policy.model "Qwen/Qwen2.5-7B" is a Hub name'
    )


def test_a_mistyped_folder_beside_others_is_not_taken_for_a_hub_name(project) -> None:
    (project.folder / "models").mkdir()
    project.change('model = "model"', 'model = "models/small"')
    assert "models/small is not a folder" in problem(project)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda model: (model / "config.json").unlink(), "has no config.json (found model.safetensors"),
        (lambda model: (model / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda model: (model / "config.json").write_text('{"model_type": "vit"}'), "has no num_attention_heads"),
        (lambda model: (model / "model.safetensors").unlink(), "has no weights; expected model.safetensors"),
        (lambda model: (model / "model.safetensors").write_bytes(b"no header"), "Was it copied whole?"),
        (lambda model: os.truncate(model / "model.safetensors", 200), "Was it copied whole?"),
    ],
)
def test_unusable_model_folder(project, spoil, message: str) -> None:
    spoil(project.model)
    assert message in problem(project)


def test_missing_dataset(project) -> None:
    (project.folder / "train.jsonl").rename(project.folder / "training.jsonl")
    assert problem(project).endswith("train.jsonl does not exist. Did you mean training.jsonl?")


def test_unusable_rows_are_named_by_file_and_line(project) -> None:
    with (project.folder / "train.jsonl").open("a") as file:
        file.write('{"prompt": 3, "answer": "x"}\nnot json\n')
    assert problem(project).splitlines() == [
        "data: 2 of 5 rows cannot be used",
        f'  {project.folder}/train.jsonl:4: field "prompt" is a number; expected a string',
        f"  {project.folder}/train.jsonl:5: not JSON at column 1: Expecting value",
    ]


def test_template_without_placeholder(project) -> None:
    (project.folder / "template.txt").write_text("no placeholder")
    project.change('train = "train.jsonl"', 'train = "train.jsonl"\ntemplate = "template.txt"')
    assert "holds {prompt} 0 times" in problem(project)


def test_more_prompts_a_step_than_rows(project) -> None:
    assert problem(project, "rollout.prompts_per_step=4") == (
        "-o: rollout.prompts_per_step (4) must be at most the 3 rows of data.train: a step never holds a prompt twice."
    )


def test_more_waves_a_step_than_the_rows_are_enough_for(project) -> None:
    assert problem(project, "rollout.prompts_per_step=1", "rollout.max_waves=4") == (
        "-o: rollout.max_waves (4) must be at most 3, as often as 1 prompts go into the 3 rows of data.train: a step "
        "never holds a prompt twice."
    )
    assert project.look("rollout.prompts_per_step=1", "rollout.max_waves=3").problems == []


def test_a_lora_target_that_the_model_does_not_have_is_found_before_the_queue(project, write_safetensors) -> None:
    shapes = {"embed.weight": [39, 8], "layers.0.q_proj.weight": [8, 8], "layers.0.up_proj.weight": [16, 8]}
    write_safetensors(project.model / "model.safetensors", shapes)
    assert problem(project, 'trainer.lora.target_modules=["q_proj", "c_attn"]') == (
        f'-o: trainer.lora.target_modules: "c_attn" names no layer of policy.model {project.model}; its layers are: '
        "q_proj, up_proj."
    )
    assert project.look('trainer.lora.target_modules=["q_proj"]').problems == []


def test_prompt_and_completion_beyond_the_models_context(project) -> None:
    project.write_rows("train.jsonl", ["a", "b", " ".join("c" * 29)])
    assert problem(project).splitlines() == [
        "data: row 2 (from 0) has 29 tokens, and 4 of completion make 33; max_position_embeddings of the model allows "
        "32.",
        f'  the prompt begins "{" ".join("c" * 29)}". Shorten or remove it, or lower rollout.max_completion_tokens.',
    ]


def test_prompt_and_completion_beyond_the_configured_context_in_held_out_data(project) -> None:
    project.write_rows("held_out.jsonl", ["u v w", "x", "y y y y"])
    found = problem(project, "rollout.max_context_tokens=6")
    assert found.startswith(
        "evaluation.data: row 2 (from 0) has 4 tokens, and 4 of completion make 8; rollout.max_context_tokens allows 6 "
        "(2 rows are too long; this is the longest)."
    )


def test_some_overlap_with_the_held_out_prompts_is_a_warning(project) -> None:
    project.write_rows("held_out.jsonl", ["a b", "z"])
    found = project.look()
    assert found.problems == []
    assert found.warnings == [
        'evaluation.data: 1 of 2 held-out prompts are also in data.train, such as "a b"; the accuracy will be too high '
        "by what is remembered"
    ]


def test_held_out_prompts_that_are_all_trained_on_are_a_problem(project) -> None:
    project.write_rows("held_out.jsonl", ["a b", "c d"])
    assert problem(project).startswith("evaluation.data: 2 of 2 held-out prompts are also in data.train")


def test_a_few_gold_answers_that_the_reward_cannot_read_are_a_warning(project) -> None:
    project.change('use = "exact_match"', 'use = "math_answer"')
    project.write_rows("train.jsonl", [*map(str, range(20)), "see the figure above"])
    found = project.look()
    assert found.problems == []
    assert found.warnings == [
        "data: 1 of 21 gold answers cannot be read by math_answer, and no completion is paid for them. Row 20, "
        "'see the figure above': gold_unparseable: the gold answer is prose: 'see the figure above'. Mend these rows, "
        "or leave them out."
    ]


def test_more_unreadable_gold_answers_than_a_run_allows_are_a_problem(project) -> None:
    project.change('use = "exact_match"', 'use = "citation"')
    project.write_rows("train.jsonl", ["[1", '["doc-1"]', "[2"])
    assert problem(project).startswith("data: 2 of 3 gold answers cannot be read by citation")
    assert project.look("scoring.max_failed=0.7").problems == []


def test_walls_for_programs_are_tried_where_programs_are_run(project) -> None:
    assert project.look().isolation is None
    project.change('use = "exact_match"', 'use = "code_tests"')
    project.write_rows("train.jsonl", ['["assert f(1) == 1"]'] * 4)
    found = project.look()
    assert (found.problems, found.isolation.is_whole) == ([], True)


def test_a_machine_without_walls_is_a_problem_here_and_a_warning_for_a_cluster(project, monkeypatch) -> None:
    def no_walls(*, allow_unsandboxed: bool):
        if not allow_unsandboxed:
            raise IsolationError("programs cannot be shut in on this machine")
        return Isolation(files="", version=0, has_seccomp=True, failures=("reads your files",))

    monkeypatch.setattr("towline.launcher.prompt_preflight.try_sandbox", no_walls)
    project.change('use = "exact_match"', 'use = "code_tests"')
    project.write_rows("train.jsonl", ['["assert f(1) == 1"]'] * 4)
    assert problem(project) == "rewards: code_tests: programs cannot be shut in on this machine"
    found = preflight(*project.read(), tokenizer=lambda model, datasets: [], for_cluster="h100")
    assert found.warnings[-1].startswith("rewards: code_tests: if h100's nodes are as this one, the run ends: ")
    project.change('use = "code_tests"', 'use = "code_tests"\nallow_unsandboxed = true')
    assert any("can do here what you can: reads your files" in warning for warning in project.look().warnings)


@pytest.mark.parametrize(
    ("source", "use", "message"),
    [
        (
            None,
            "exact_mach",
            "small.toml:17: rewards.use: exact_mach is not a built-in reward. Did you mean exact_match?",
        ),
        (None, "mine.py:grade", "there is no Python file"),
        ("def grade(completion, gold:", "mine.py:grade", "mine.py:1: '(' was never closed"),
        ("def grades(completion, gold): ...", "mine.py:grade", "has no function grade. Did you mean grades?"),
        ("def grade(completion): ...", "mine.py:grade", "mine.py:1: grade must take (completion, gold)"),
        ("def grade(completion, gold, more): ...", "mine.py:grade", "grade must take (completion, gold)"),
        ("def grade(completion, gold, *, more): ...", "mine.py:grade", "grade must take (completion, gold)"),
        ("async def grade(completion, gold): ...", "mine.py:grade", "grade is async; expected a plain function"),
    ],
)
def test_rewards_that_do_not_exist(project, source: str | None, use: str, message: str) -> None:
    if source is not None:
        (project.folder / "mine.py").write_text(source)
    project.change('use = "exact_match"', f'use = "{use}"')
    assert message in problem(project)


@pytest.mark.parametrize(
    "source",
    [
        "def grade(completion, gold, *, strict=True): ...",
        "from elsewhere import grade",
        "from elsewhere import *",
        "grade = lambda completion, gold: 0.0",
        "try:\n    import fast\nexcept ImportError:\n    def grade(*texts): ...",
        "class grade:\n    def __new__(cls, completion, gold): ...",
    ],
)
def test_rewards_of_the_user_are_found_without_running_them(project, source: str) -> None:
    (project.folder / "mine.py").write_text(f"{source}\nraise RuntimeError('was imported')\n")
    project.change('use = "exact_match"', 'use = "mine.py:grade"')
    assert project.look().problems == []


def test_a_users_reward_is_found_from_everywhere(project) -> None:
    project.change('use = "exact_match"', 'use = "mine.py:grade"')
    (reward,) = project.read()[1].rewards
    assert reward.use == f"{project.folder}/mine.py:grade"
    assert reward.part_name == "mine.grade"


def test_run_folder_that_exists(project) -> None:
    run = make_run(*project.read("run.name=mine"))
    (found,) = project.look("run.name=mine").problems
    assert found.startswith(f"-o: run folder {run.root} exists; nothing is overwritten.")


def test_run_folder_in_use(project) -> None:
    run = make_run(*project.read("run.name=mine"))
    with RunLock(run):
        (found,) = project.look("run.name=mine").problems
    assert "exists and a run is using it now" in found


def test_run_root_below_a_file(project) -> None:
    (project.folder / "runs").write_text("a file")
    (found,) = project.look().problems
    assert f"{project.folder}/runs is not a folder that you may write to" in found


def test_too_little_disk_names_what_is_needed_and_what_is_free(project) -> None:
    found = problem(project, "steps=1000000000000")
    assert "free and the run needs up to" in found
    assert "4 checkpoints of" in found


@pytest.mark.skipif(has_gpu(), reason="the plan is not compared with the memory of GPUs")
def test_too_little_memory_is_a_warning(project) -> None:
    found = project.look("rollout.kv_cache_gib=1000000")
    assert found.problems == []
    assert found.warnings[0].startswith("the run may need 1,000,0")
    assert "it may be killed" in found.warnings[0]


def test_all_problems_are_found_at_once(project) -> None:
    (project.model / "config.json").unlink()
    (project.folder / "train.jsonl").write_text("{}\n")
    project.change('use = "exact_match"', 'use = "mine.py:grade"')
    assert len(project.look().problems) == 3


def test_chat_without_a_chat_template_is_found_by_the_models_own_tokenizer(
    project, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    project.file.write_text(project.file.read_text().replace("chat = false", "chat = true"))
    assert command(["check", str(project.file)]) == 2
    assert "has no chat template. Set data.chat = false" in capsys.readouterr().out


def test_unusable_tokenizer_is_found(project, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    (project.model / "tokenizer.json").write_text("{}")
    assert command(["check", str(project.file)]) == 2
    assert "tokenizer" in capsys.readouterr().out


def test_the_run_root_may_not_exist_yet(project, tmp_path: Path) -> None:
    assert project.look(f"run.root={tmp_path}/a/b/c").problems == []


def test_check_shows_prompts_with_the_turns_of_the_chat_template(project, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    template = "{% for turn in messages %}[{{ turn.role }}] {{ turn.content }} {% endfor %}[assistant]"
    config = project.model / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    project.file.write_text(project.file.read_text().replace("chat = false", "chat = true"))
    assert command(["check", str(project.file)]) == 0
    assert "          | [user] a b [assistant]" in capsys.readouterr().out
