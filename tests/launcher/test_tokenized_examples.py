"""What `towline check` shows of examples: their tokens, the first with their masks, and what is wrong with them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from chat_tokenizers import BRACKETS, CHATML, EOS, IM_END, byte_tokenizer, save_tokenizer
from towline.launcher.example_lines import example_lines
from towline.launcher.marked_examples import marked
from towline.launcher.tokenized_examples import RenderedExample, TokenizedExamples, tokenize_examples
from towline.storage.errors import ConfigError, ModelError
from towline.storage.example_config import DemonstrationData, ExampleConfig, PreferenceData, StepData
from towline.storage.examples import ExampleDataset, survey_demonstrations, survey_preferences, survey_steps
from towline.trainer.example_lengths import LengthCounts
from towline.trainer.packing import TokenSequence
from towline.trainer.token_examples import TokenExample, TokenPair, TokenSteps


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    return save_tokenizer(folder, byte_tokenizer(), eos_token="<|im_end|>", chat_template=CHATML)


def written(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def demonstrations(tmp_path: Path, *rows: tuple[str, str], **values: Any) -> tuple[ExampleConfig, ExampleDataset[Any]]:
    source = written(tmp_path / "demos.jsonl", *({"prompt": prompt, "completion": said} for prompt, said in rows))
    config = DemonstrationData(train=source, **values)
    return config, survey_demonstrations(config)


def tokenized(
    model: Path, given: tuple[ExampleConfig, ExampleDataset[Any]], context_tokens: int | None = None
) -> TokenizedExamples:
    (found,) = tokenize_examples(model, [(given[0], given[1].rows)], context_tokens=context_tokens)
    return found


# Marks


def by_letter(ids: list[int]) -> str:
    return "".join(chr(97 + token) for token in ids)


def sequence(num_prompt: int, num_tokens: int) -> TokenSequence:
    return TokenSequence(token_ids=np.arange(num_tokens), num_prompt_tokens=num_prompt)


def test_marks_stand_around_every_run_that_is_learned():
    trained = np.array([True, True, False, False, True])
    assert marked(by_letter, TokenExample(row=0, tokens=sequence(2, 7), trained=trained)) == ["ab⟦cd⟧ef⟦g⟧"]


def test_a_pair_is_two_texts_of_one_prompt():
    pair = TokenPair(row=0, chosen=sequence(2, 4), rejected=sequence(2, 5), margin=None)
    assert marked(by_letter, pair) == ["ab⟦cd⟧", "ab⟦cde⟧"]


def test_the_label_of_a_step_stands_after_it():
    steps = TokenSteps(
        row=0, tokens=sequence(2, 7), step_ends=np.array([3, 4, 6]), labels=np.array([1, -100, 0], dtype=np.int64)
    )
    assert marked(by_letter, steps) == ["abcd⟦1⟧e⟦no label⟧fg⟦0⟧"]


# In the process of the tokenizer


def test_every_kind_is_counted_and_rendered_in_one_process(tmp_path: Path, model: Path):
    demos = demonstrations(tmp_path, ("hi", "yes"), ("hi", "no"), ("a", "b"), ("c", "d"))
    pairs = PreferenceData(
        train=written(tmp_path / "pairs.jsonl", {"prompt": "1", "chosen": "2", "rejected": "three"}), chat=False
    )
    steps = StepData(
        train=written(tmp_path / "steps.jsonl", {"prompt": "1", "steps": ["a", "bc"], "labels": [1, None]}),
        chat=False,
        separator=";",
    )
    found = tokenize_examples(
        model,
        [(demos[0], demos[1].rows), (pairs, survey_preferences(pairs).rows), (steps, survey_steps(steps).rows)],
        context_tokens=512,
    )
    before = len("|user\nhi|\n|assistant\n")
    assert found[0].prompt_tokens == [before, before, before - 1, before - 1]
    assert found[0].learned_tokens == [4, 3, 2, 2]
    assert [example.row for example in found[0].rendered] == [0, 1, 2]
    assert found[0].rendered[1].texts == ["<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧"]
    assert (found[1].prompt_tokens, found[1].learned_tokens) == ([1], [2 + 6])
    assert found[1].rendered[0].texts == ["1⟦2<|im_end|>⟧", "1⟦three<|im_end|>⟧"]
    assert (found[2].prompt_tokens, found[2].learned_tokens) == ([1], [2 + 3])
    assert found[2].rendered[0].texts == ["1a;⟦1⟧bc;⟦no label⟧"]
    for dataset in found:
        assert dataset.problems == []
        assert dataset.warnings == []
        assert dataset.lengths is not None
        assert dataset.lengths.max_tokens == 512
        assert dataset.lengths.num_overlong == 0


def test_over_long_examples_are_a_problem_or_counted(tmp_path: Path, model: Path):
    rows = (("hi", "y"), ("hi", "y" * 40))
    refused = tokenized(model, demonstrations(tmp_path, *rows, chat=False, max_tokens=20))
    assert refused.problems == [
        "row 1 (from 0) has 43 tokens; 1 of 2 examples have more than max_tokens (20). Allow more, or set "
        'overlong = "drop" or "truncate".'
    ]
    assert refused.lengths is None
    assert refused.learned_tokens == [2, 41]
    cut = tokenized(model, demonstrations(tmp_path, *rows, chat=False, overlong="truncate"), context_tokens=20)
    assert cut.problems == []
    assert cut.learned_tokens == [2, 18]
    assert cut.rendered[1].texts == [f"hi⟦{'y' * 18}⟧"]
    assert cut.lengths is not None
    assert (cut.lengths.num_overlong, cut.lengths.num_truncated) == (1, 1)
    with pytest.raises(ConfigError, match="is more than the model's context"):
        tokenized(model, demonstrations(tmp_path, *rows, max_tokens=20), context_tokens=10)


def test_rows_that_cannot_be_tokenised_are_problems_of_which_the_first_are_told(tmp_path: Path):
    tokenizer = byte_tokenizer(adds_bos=True)
    model = save_tokenizer(tmp_path / "model", tokenizer, bos_token="<s>", eos_token="</s>", chat_template=BRACKETS)
    talk = [{"role": role, "content": "a"} for role in ("system", "user", "assistant")]
    source = written(tmp_path / "demos.jsonl", *[{"messages": talk}] * 4, {"messages": talk[1:]})
    config = DemonstrationData(train=source, fields={"messages": "messages"})
    found = tokenized(model, (config, survey_demonstrations(config)))
    places = [problem.partition(":")[0] for problem in found.problems[:3]]
    assert places == ["row 0 (from 0)", "row 1 (from 0)", "row 2 (from 0)"]
    assert found.problems[3] == "and 1 more rows that cannot be tokenised"
    assert found.learned_tokens == [2]
    assert found.rendered[0].row == 4


def test_an_end_that_generation_does_not_stop_at_is_warned_of(tmp_path: Path):
    model = save_tokenizer(tmp_path / "model", byte_tokenizer(), eos_token="</s>", stops=[EOS], chat_template=CHATML)
    given = demonstrations(tmp_path, ("hi", "yes"))
    assert tokenized(model, given).warnings == [
        f"the chat template ends a turn with <|im_end|>, at which generation does not stop: add {IM_END} to "
        "eos_token_id in the model's generation_config.json"
    ]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, IM_END]}))
    assert tokenized(model, given).warnings == []


def test_what_the_tokenizer_cannot_write_is_warned_of(tmp_path: Path):
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model = save_tokenizer(tmp_path / "model", tokenizer, eos_token="</s>", unk_token="<unk>")
    given = demonstrations(tmp_path, ("a ", "b"), ("a ", "c b"), ("c ", "b"), chat=False)
    assert tokenized(model, given).warnings == [
        "1 of 3 examples teach <unk>, which stands for what the tokenizer cannot write"
    ]


def test_a_model_without_a_tokenizer_or_template_is_an_error_of_the_model(tmp_path: Path):
    given = demonstrations(tmp_path, ("hi", "yes"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="no tokenizer that can be loaded"):
        tokenized(tmp_path / "empty", given)
    model = save_tokenizer(tmp_path / "model", byte_tokenizer(), eos_token="</s>")
    with pytest.raises(ModelError, match="has no chat template"):
        tokenized(model, given)


def test_asking_imports_neither_transformers_nor_torch():
    program = (
        "import sys, towline.launcher.example_lines, towline.launcher.tokenized_examples\n"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'jinja2'} & sys.modules.keys()))"
    )
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Lines


def test_lines_show_counts_doubts_and_the_first_examples(tmp_path: Path):
    pairs = [("b", "c"), ("c", "b"), ("b", "b"), ("b", "b")]
    source = written(
        tmp_path / "pairs.jsonl", *({"prompt": "a", "chosen": good, "rejected": bad} for good, bad in pairs)
    )
    dataset = survey_preferences(PreferenceData(train=source))
    lengths = LengthCounts(
        num_examples=4,
        num_overlong=2,
        num_truncated=1,
        num_dropped=1,
        max_tokens=1024,
        longest_row=2,
        longest_tokens=5000,
    )
    found = TokenizedExamples(
        rows=[0, 1, 2],
        prompt_tokens=[10, 20, 30],
        learned_tokens=[2, 4, 2000],
        rendered=[RenderedExample(row=0, texts=["a\n⟦b\x1b</s>⟧", "a\n⟦c</s>⟧"])],
        lengths=lengths,
        problems=[],
        warnings=[],
    )
    assert list(example_lines("train", dataset, found, "truncate")) == [
        f"data    train   4 preferences, 1 of them again, 0 rows rejected   {source}",
        "        tokens before: 20 median, 30 p95, 30 max",
        "        tokens learned: 4 median, 2,000 p95, 2,000 max",
        '        2 of 4 have more than 1,024 tokens, row 2 has 5,000: 1 cut, 1 left out (overlong = "truncate")',
        "        2 with chosen the same as rejected, of which nothing is learned",
        "        1 that an earlier row has the other way round",
        "        row 0, chosen",
        "          | a",
        "          | ⟦b\\x1b</s>⟧",
        "        row 0, rejected",
        "          | a",
        "          | ⟦c</s>⟧",
    ]


def test_lines_count_characters_where_there_is_no_tokenizer(tmp_path: Path):
    _, dataset = demonstrations(tmp_path, ("hi", "yes"), ("hello", "no"))
    assert list(example_lines("held out", dataset, None, "refuse")) == [
        f"data    held out   2 demonstrations, 0 of them again, 0 rows rejected   {dataset.source}",
        "        characters of a prompt: 2 median, 5 p95, 5 max",
        "        characters of a completion: 2 median, 3 p95, 3 max",
    ]
