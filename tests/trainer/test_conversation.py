"""Token ids and masks of examples: one BOS, one learned end and nothing after it, prompts as generated from."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from chat_tokenizers import (
    BOS,
    BRACKETS,
    CHATML,
    DROPS_THINKING,
    ENDS_THE_TEXT,
    EOS,
    IM_END,
    OPENS_THINKING,
    PLAIN,
    byte_tokenizer,
    prefixing_tokenizer,
    save_tokenizer,
)
from towline.rollout.tokenizing import PromptTokenizer
from towline.storage.errors import DataError, ModelError
from towline.storage.records import Demonstration, LabelledSteps, Preference, Role, Turn
from towline.trainer.conversation import ConversationTokenizer
from towline.trainer.packing_rows import pad_rows
from towline.trainer.token_examples import TokenExample

MODELS = Path(__file__).parents[2] / "models"
MODEL_FOLDERS = sorted(path.parent.name for path in MODELS.glob("*/tokenizer.json"))


@pytest.fixture
def chatml(tmp_path: Path) -> ConversationTokenizer:
    folder = save_tokenizer(tmp_path, byte_tokenizer(), eos_token="<|im_end|>", chat_template=CHATML)
    return ConversationTokenizer(folder, chat=True)


@pytest.fixture
def brackets(tmp_path: Path) -> ConversationTokenizer:
    tokenizer = byte_tokenizer(adds_bos=True)
    folder = save_tokenizer(tmp_path, tokenizer, bos_token="<s>", eos_token="</s>", chat_template=BRACKETS)
    return ConversationTokenizer(folder, chat=True)


@pytest.fixture
def raw(tmp_path: Path) -> ConversationTokenizer:
    folder = save_tokenizer(tmp_path, byte_tokenizer(adds_bos=True), bos_token="<s>", eos_token="</s>")
    return ConversationTokenizer(folder, chat=False)


def saved(tmp_path: Path, template: str, **settings: object) -> Path:
    return save_tokenizer(tmp_path, byte_tokenizer(), chat_template=template, **{"eos_token": "<|im_end|>", **settings})


def turns(*contents: str, system: str | None = None) -> tuple[Turn, ...]:
    roles: tuple[Role, Role] = ("user", "assistant")
    said = [Turn(role=roles[index % 2], content=content) for index, content in enumerate(contents)]
    return (*([] if system is None else [Turn(role="system", content=system)]), *said)


def talk(*contents: str, system: str | None = None, row: int = 0) -> Demonstration:
    return Demonstration(row=row, turns=turns(*contents, system=system))


def marked(tokenizer: ConversationTokenizer, example: TokenExample) -> str:
    """Text with what is learned in brackets of its own."""
    ids, start = example.tokens.token_ids, example.tokens.num_prompt_tokens
    assert len(example.trained) == len(ids) - start
    assert example.trained[0]
    assert example.trained[-1]
    is_trained = np.concatenate([np.zeros(start, dtype=bool), example.trained])
    cuts = [0, *(np.flatnonzero(np.diff(is_trained)) + 1), len(ids)]
    runs = [tokenizer.decode(ids[first:last]) for first, last in itertools.pairwise(cuts)]
    return "".join(f"⟦{run}⟧" if index % 2 else run for index, run in enumerate(runs))


# What is learned


def test_a_turn_is_learned_with_its_end_and_without_the_newline_after_it(chatml: ConversationTokenizer):
    assert marked(chatml, chatml.demonstration(talk("hi", "yes"))) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧"
    )


def test_every_turn_of_the_assistant_is_learned_and_no_other(chatml: ConversationTokenizer):
    example = chatml.demonstration(talk("hi", "yes", "so", "no", system="be"))
    assert marked(chatml, example) == (
        "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧"
        "\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧"
    )


def test_only_the_last_turn_is_learned_where_that_is_asked(chatml: ConversationTokenizer):
    assert marked(chatml, chatml.demonstration(talk("hi", "yes", "so", "no"), turns="last")) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"
        "\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧"
    )


def test_a_template_that_trims_and_ends_turns_with_eos(brackets: ConversationTokenizer):
    assert marked(brackets, brackets.demonstration(talk("hi", " yes ", "so", "no"))) == (
        "<s>[Q] hi [A]⟦ yes</s>⟧[Q] so [A]⟦ no</s>⟧"
    )


def test_g3_22_the_end_is_learned_once_and_padding_is_not_though_their_ids_are_equal(tmp_path: Path):
    settings = {"eos_token": "</s>", "pad_token": "</s>"}
    tokenizer = ConversationTokenizer(save_tokenizer(tmp_path, byte_tokenizer(), **settings), chat=False)
    short, long = tokenizer.demonstration(talk("ab", "c")), tokenizer.demonstration(talk("ab", "cdef"))
    np.testing.assert_array_equal(short.trained, [True, True])
    assert short.tokens.token_ids[-1] == EOS
    batch = pad_rows([short.tokens, long.tokens])
    length = batch.max_length
    labels = np.full(2 * length, -100)
    labels[batch.logit_index + 1] = batch.target_ids
    c = short.tokens.token_ids[2]
    np.testing.assert_array_equal(labels[:length], [-100, -100, c, EOS, -100, -100, -100])


@pytest.mark.parametrize("said", ["answer", "answer</s>", "answer</s>\n", "answer</s> "])
def test_g3_23_a_text_is_ended_exactly_once(raw: ConversationTokenizer, said: str):
    ids = list(raw.demonstration(talk("hi", said)).tokens.token_ids)
    assert ids.count(EOS) == 1
    assert ids[-1] == EOS
    assert raw.decode(ids) == "<s>hianswer</s>"


@pytest.mark.parametrize("said", ["answer", "answer<|im_end|>", "answer<|im_end|>\n", "answer<|im_end|><|im_end|>"])
def test_g3_23_a_turn_is_ended_exactly_once(chatml: ConversationTokenizer, said: str):
    example = chatml.demonstration(talk("hi", said, "so", said))
    learned = example.tokens.token_ids[example.tokens.num_prompt_tokens :][example.trained]
    assert chatml.decode(list(learned)) == "answer<|im_end|>answer<|im_end|>"


def test_an_end_inside_what_is_said_is_refused_with_the_row(chatml: ConversationTokenizer):
    with pytest.raises(DataError, match=r"row 7 \(from 0\): the assistant says <\|im_end\|>, which ends its turn"):
        chatml.demonstration(talk("hi", "a<|im_end|>b", row=7))


@pytest.mark.parametrize("said", ["<|im_end|>", "\n<|im_end|>\n"])
def test_a_turn_of_nothing_but_its_end_is_refused(chatml: ConversationTokenizer, said: str):
    with pytest.raises(DataError, match=r"row 0 \(from 0\): the assistant says nothing but <\|im_end\|>"):
        chatml.demonstration(talk("hi", said))


def test_a_template_without_an_end_token_gets_one_after_the_last_turn_only(tmp_path: Path):
    tokenizer = ConversationTokenizer(saved(tmp_path, PLAIN), chat=True)
    assert marked(tokenizer, tokenizer.demonstration(talk("hi", "yes"))) == "user: hi\nassistant: ⟦yes<|im_end|>⟧"
    with pytest.raises(DataError, match=r'writes no end token after turn 1 \(from 0\).*Set turns = "last"'):
        tokenizer.demonstration(talk("hi", "yes", "so", "no"))
    example = tokenizer.demonstration(talk("hi", "yes", "so", "no"), turns="last")
    assert marked(tokenizer, example) == "user: hi\nassistant: yes\nuser: so\nassistant: ⟦no<|im_end|>⟧"


def test_an_end_of_the_text_after_that_of_the_turn_is_not_learned(tmp_path: Path):
    folder = saved(tmp_path, ENDS_THE_TEXT, eos_token="</s>", stops=[EOS, IM_END])
    tokenizer = ConversationTokenizer(folder, chat=True)
    assert marked(tokenizer, tokenizer.demonstration(talk("hi", "yes", "so", "no"))) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧"
        "\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧"
    )


def test_what_stands_before_the_only_token_that_the_engine_stops_at_is_learned(tmp_path: Path):
    tokenizer = ConversationTokenizer(saved(tmp_path, ENDS_THE_TEXT, eos_token="</s>"), chat=True)
    assert marked(tokenizer, tokenizer.demonstration(talk("hi", "yes"))).endswith("⟦yes<|im_end|>\n</s>⟧")
    with pytest.raises(DataError, match="writes turn 1"):
        tokenizer.demonstration(talk("hi", "yes", "so", "no"))


def test_the_end_of_a_turn_may_be_none_that_the_engine_stops_at(tmp_path: Path):
    """A base model with a chat template: its end of text is not its end of turn."""
    tokenizer = ConversationTokenizer(saved(tmp_path, CHATML, eos_token="</s>"), chat=True)
    example = tokenizer.demonstration(talk("hi", "yes"))
    assert list(example.tokens.token_ids).count(IM_END) == 2
    assert example.tokens.token_ids[-1] == IM_END
    assert tokenizer.stop_token_ids == [EOS]
    assert tokenizer.unstopped_end == (IM_END, "<|im_end|>")


def test_an_end_token_that_is_the_unknown_one_too_stands_for_the_end(tmp_path: Path):
    settings = {"eos_token": "</s>", "unk_token": "</s>"}
    assert (
        ConversationTokenizer(save_tokenizer(tmp_path, byte_tokenizer(), **settings), chat=False).unknown_token_id
        is None
    )


def test_stop_tokens_are_those_of_the_engine(tmp_path: Path):
    folder = saved(tmp_path, CHATML, stops=[EOS, IM_END])
    assert ConversationTokenizer(folder, chat=True).stop_token_ids == PromptTokenizer(folder, chat=True).stop_token_ids


def test_a_tokenizer_without_an_end_token_cannot_end_a_text(tmp_path: Path):
    tokenizer = ConversationTokenizer(save_tokenizer(tmp_path, byte_tokenizer()), chat=False)
    with pytest.raises(ModelError, match="has no end token, so that a completion could not be ended"):
        tokenizer.demonstration(talk("hi", "yes"))


# The prompt


@pytest.mark.parametrize("prompt", ["hi", "<s>hi"])
def test_g3_25_bos_stands_at_the_beginning_and_nowhere_else(raw: ConversationTokenizer, prompt: str):
    pair = raw.preference(Preference(row=0, prompt=turns(prompt), chosen="yes", rejected="no", margin=None))
    for tokens, text in ((pair.chosen, "<s>hiyes</s>"), (pair.rejected, "<s>hino</s>")):
        np.testing.assert_array_equal(np.flatnonzero(tokens.token_ids == BOS), [0])
        assert raw.decode(list(tokens.token_ids)) == text


def test_g3_25_bos_of_the_template_is_not_doubled(brackets: ConversationTokenizer):
    ids = brackets.demonstration(talk("hi", "yes", "so", "no")).tokens.token_ids
    np.testing.assert_array_equal(np.flatnonzero(ids == BOS), [0])


def test_g3_26_a_tokenizer_without_bos_adds_none(tmp_path: Path):
    tokenizer = ConversationTokenizer(save_tokenizer(tmp_path, byte_tokenizer(), eos_token="</s>"), chat=False)
    ids = tokenizer.demonstration(talk("hi", "yes")).tokens.token_ids
    assert ids.dtype == np.int32
    assert tokenizer.decode(list(ids)) == "hiyes</s>"
    assert tokenizer.decode([ids[0]]) == "h"


@pytest.mark.parametrize("template", [CHATML, BRACKETS, DROPS_THINKING, PLAIN])
@pytest.mark.parametrize("text", ["hi", "<s>hi", "a.\n", " = "])
def test_a_prompt_has_the_ids_that_are_generated_from(tmp_path: Path, template: str, text: str):
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    folder = save_tokenizer(tmp_path, byte_tokenizer(adds_bos=True), chat_template=template, **settings)
    for chat in (True, False):
        assert_prompts_agree(folder, text, chat=chat)


def test_a_prompt_of_a_prefixing_tokenizer_has_the_ids_that_are_generated_from(tmp_path: Path):
    folder = save_tokenizer(tmp_path, prefixing_tokenizer(), bos_token="<s>", eos_token="</s>", chat_template=BRACKETS)
    for chat in (True, False):
        assert_prompts_agree(folder, "sum 1 + 2 =", chat=chat)


@pytest.mark.parametrize("name", MODEL_FOLDERS)
def test_a_prompt_of_a_model_here_has_the_ids_that_are_generated_from(name: str):
    for chat in (True, False):
        if chat and not (MODELS / name / "chat_template.jinja").exists():
            continue
        for text in ("Sort: 3 1 2 =", "What is 1+1?\n\nThink.\n", "é 你好 <b>"):
            assert_prompts_agree(MODELS / name, text, chat=chat)


def assert_prompts_agree(folder: Path, text: str, *, chat: bool) -> None:
    wanted, tokenizer = PromptTokenizer(folder, chat=chat).encode(text), ConversationTokenizer(folder, chat=chat)
    pair = tokenizer.preference(Preference(row=0, prompt=turns(text), chosen="1", rejected="2 2", margin=1.5))
    steps = tokenizer.steps(LabelledSteps(row=0, prompt=turns(text), steps=("1",), labels=(1,)))
    for tokens in (tokenizer.demonstration(talk(text, "1")).tokens, pair.chosen, pair.rejected, steps.tokens):
        assert tokens.token_ids[: tokens.num_prompt_tokens].tolist() == wanted
    assert pair.margin == 1.5


def test_no_token_reaches_over_the_end_of_the_prompt(raw: ConversationTokenizer):
    """ "=1" would be one token; the engine has read "=" and can only write "1"."""
    ids = raw.demonstration(talk("1=", "1")).tokens
    assert [raw.decode([token]) for token in ids.token_ids] == ["<s>", "1", "=", "1", "</s>"]
    assert ids.num_prompt_tokens == 3


def test_a_line_end_that_begins_a_turn_does_not_join_that_of_the_prompt(chatml: ConversationTokenizer):
    tokens = chatml.demonstration(talk("hi", "\nyes")).tokens
    completion = tokens.token_ids[tokens.num_prompt_tokens :]
    assert chatml.decode(list(completion)) == "\nyes<|im_end|>"
    other = chatml.demonstration(talk("hi", "no")).tokens
    np.testing.assert_array_equal(
        tokens.token_ids[: tokens.num_prompt_tokens], other.token_ids[: other.num_prompt_tokens]
    )


def test_a_prefixing_tokenizer_puts_no_space_before_a_completion(tmp_path: Path):
    folder = save_tokenizer(tmp_path, prefixing_tokenizer(), bos_token="<s>", eos_token="</s>")
    tokenizer = ConversationTokenizer(folder, chat=False)
    tokens = tokenizer.demonstration(talk("1 =", "1")).tokens
    pieces = [tokenizer._tokenizer.convert_ids_to_tokens(int(token)) for token in tokens.token_ids]
    assert pieces == ["<s>", "▁", "1", "▁", "=", "1", "</s>"]


def test_a_tokenizer_that_ends_every_text_is_refused(tmp_path: Path):
    tokenizer = byte_tokenizer(adds_bos=True, adds_eos=True)
    folder = save_tokenizer(tmp_path, tokenizer, bos_token="<s>", eos_token="</s>")
    with pytest.raises(ModelError, match="ends every text with a special token"):
        ConversationTokenizer(folder, chat=False)


# Templates that rewrite or refuse


def test_a_template_that_rewrites_earlier_turns_teaches_the_last_only(tmp_path: Path):
    tokenizer = ConversationTokenizer(saved(tmp_path, DROPS_THINKING), chat=True)
    example = talk("hi", "<think>hm</think>yes", "so", "<think>h</think>no", row=3)
    with pytest.raises(DataError, match=r'row 3 \(from 0\): the chat template writes turn 1 .*Set turns = "last"'):
        tokenizer.demonstration(example)
    assert marked(tokenizer, tokenizer.demonstration(example, turns="last")) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        "<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n⟦<think>h</think>no<|im_end|>⟧"
    )
    with pytest.raises(DataError, match="turn 1"):
        tokenizer.demonstration(talk("hi", "yes", "so", "no"))
    assert marked(tokenizer, tokenizer.demonstration(talk("hi", "yes"))).endswith("⟦<think></think>yes<|im_end|>⟧")


def test_a_template_that_opens_a_turn_otherwise_than_it_writes_it_is_refused(tmp_path: Path):
    tokenizer = ConversationTokenizer(saved(tmp_path, OPENS_THINKING), chat=True)
    with pytest.raises(DataError, match=r"does not write the last turn after the prompt that it opens.*chat = false"):
        tokenizer.demonstration(talk("hi", "yes"))


def test_a_template_that_knows_no_system_turn_is_named_with_the_row(brackets: ConversationTokenizer):
    with pytest.raises(DataError) as caught:
        brackets.demonstration(talk("hi", "yes", system="be", row=12))
    assert str(caught.value) == (
        "row 12 (from 0): the chat template refuses its turns (system, user, assistant): only user and assistant turns "
        "are known. Write what the system turn says into the user's."
    )


def test_turns_need_the_chat_template(raw: ConversationTokenizer):
    with pytest.raises(DataError, match=r"row 0 \(from 0\) has the turns user, assistant, user before its completion"):
        raw.demonstration(talk("a", "b", "c", "d"))


def test_folders_without_a_tokenizer_or_a_template_are_refused(tmp_path: Path):
    with pytest.raises(ModelError, match="no tokenizer that can be loaded"):
        ConversationTokenizer(tmp_path, chat=False)
    folder = save_tokenizer(tmp_path, byte_tokenizer(), eos_token="</s>")
    with pytest.raises(ModelError, match=r"has no chat template"):
        ConversationTokenizer(folder, chat=True)


# Pairs and steps


def test_a_pair_has_one_prompt_and_two_ended_completions(chatml: ConversationTokenizer):
    prompt = turns("hi", "yes", "so")
    pair = chatml.preference(Preference(row=4, prompt=prompt, chosen="good", rejected="\nbad", margin=None))
    start = pair.chosen.num_prompt_tokens
    assert (pair.row, pair.margin, pair.is_identical) == (4, None, False)
    assert pair.rejected.num_prompt_tokens == start
    np.testing.assert_array_equal(pair.chosen.token_ids[:start], pair.rejected.token_ids[:start])
    said = [chatml.decode(list(tokens.token_ids[start:])) for tokens in (pair.chosen, pair.rejected)]
    assert said == ["good<|im_end|>", "\nbad<|im_end|>"]


def test_g3_43_each_step_is_judged_at_its_last_token_and_no_label_stays_none(chatml: ConversationTokenizer):
    steps = ("ab", "c.", "d", "e", "f")
    example = LabelledSteps(row=0, prompt=turns("hi"), steps=steps, labels=(None, None, 0, None, 1))
    judged = chatml.steps(example)
    assert judged.labels.dtype == np.int64
    np.testing.assert_array_equal(judged.labels, [-100, -100, 0, -100, 1])
    np.testing.assert_array_equal(np.flatnonzero(judged.labels != -100), [2, 4])
    starts = [judged.tokens.num_prompt_tokens, *(judged.step_ends[:-1] + 1)]
    texts = [
        chatml.decode(list(judged.tokens.token_ids[start : end + 1]))
        for start, end in zip(starts, judged.step_ends, strict=True)
    ]
    assert texts == [f"{step}\n" for step in steps]
    assert judged.step_ends[-1] == len(judged.tokens.token_ids) - 1


def test_a_step_is_judged_the_same_whatever_follows_it(chatml: ConversationTokenizer):
    def judged(*steps: str):
        labels = (1,) * len(steps)
        return chatml.steps(LabelledSteps(row=0, prompt=turns("hi"), steps=steps, labels=labels), separator="\n")

    alone, followed = judged("a."), judged("a.", "\nb")
    end = alone.step_ends[0]
    assert followed.step_ends[0] == end
    np.testing.assert_array_equal(alone.tokens.token_ids, followed.tokens.token_ids[: end + 1])


def test_no_torch_is_needed(tmp_path: Path):
    """The command tokenises on login nodes."""
    folder = save_tokenizer(tmp_path, byte_tokenizer(), eos_token="<|im_end|>", chat_template=CHATML)
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from towline.storage.records import Demonstration, Turn\n"
        "from towline.trainer.conversation import ConversationTokenizer\n"
        f"tokenizer = ConversationTokenizer(Path({str(folder)!r}), chat=True)\n"
        "turns = (Turn(role='user', content='a'), Turn(role='assistant', content='b'))\n"
        "print(tokenizer.demonstration(Demonstration(row=0, turns=turns)).trained.tolist())"
    )
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[True, True]", done.stderr
