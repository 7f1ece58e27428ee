import dataclasses

import pytest

from towline.launcher.cli import command
from towline.launcher.text import printable
from towline.storage.ledger import read_scores, read_shard, seal_scores, seal_shard
from towline.storage.records import ChunkId
from towline.storage.run_directory import RunDirectory


def shown(run: RunDirectory, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert command(["samples", str(run.root), *options]) == 0
    return capsys.readouterr().out


def test_a_sample_shows_prompt_answer_rewards_and_logprobs(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(run, capsys, "--step", "0", "--num", "1").splitlines() == [
        "small-1  step 0",
        "",
        "prompt  row 0, 3 tokens, answer answer 0",
        "  | prompt 0",
        "  | second line",
        "  reward 0   exact_match 0",
        "  2 tokens, stop   log-prob mean -0.500, min -0.750",
        r"    > completion 0 of step 0\x1b[31m",
    ]


def test_without_a_step_the_latest_is_shown_whole(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(run, capsys)
    assert text.startswith("small-1  step 2")
    assert text.count("    > completion") == 4
    assert text.count("prompt  row") == 2


def test_prompts_of_further_waves_are_marked(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (ChunkId(step=1, wave=wave, chunk=0) for wave in range(2))
    shard, sheet = read_shard(run.chunk(first)), read_scores(run.chunk(first))
    digest = seal_shard(run.chunk(second), shard.groups, dataclasses.replace(shard.origin, chunk=second))
    seal_scores(run.chunk(second), dataclasses.replace(sheet, shard_digest=digest))
    lines = shown(run, capsys, "--step", "1", "--num", "8").splitlines()
    headings = [line.partition(",")[0] for line in lines if line.startswith("prompt")]
    assert headings == ["prompt  row 0", "prompt  row 1", "prompt  row 0 of wave 1", "prompt  row 1 of wave 1"]


def test_num_counts_completions_and_prints_no_heading_beyond(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(run, capsys, "--num", "2")
    assert text.count("    > completion") == 2
    assert text.count("prompt  row") == 1


def test_failed_shows_only_what_could_not_be_graded(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(run, capsys, "--failed")
    assert text.count("    > completion") == 1
    assert "  reward nan   exact_match FAILED\n" in text
    assert "grading FAILED: exact_match: ZeroDivisionError at reward.py:3" in text
    assert "row 0," not in text
    assert "no completion's grading failed" in shown(run, capsys, "--failed", "--step", "1")


def test_tokens_show_id_logprob_and_version(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(run, capsys, "--tokens", "--num", "1").splitlines()
    assert lines[-2:] == ["        0        7    -0.2500  v2", "        1        1    -0.7500  v2"]


def test_a_step_that_is_not_there(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["samples", str(run.root), "--step", "7"]) == 2
    assert capsys.readouterr().err == "small-1 has no scored rollouts of step 7. There: steps 0 to 2.\n"


def test_what_a_model_wrote_cannot_move_the_cursor() -> None:
    assert printable("a\tb\r\x1b[2J\u202eé") == r"a\tb\r\x1b[2J\u202eé"
    assert printable("\ud83d") == r"\ud83d"
