"""Special tokens exactly once, the chat template exactly once, every end token a stop, no character broken."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from towline.rollout.tokenizing import PromptTokenizer
from towline.storage.errors import ModelError

WORDS = ["<unk>", "<s>", "</s>", "<user>", "<assistant>", "sort", "this", "please"]
BOS, EOS, USER, ASSISTANT, SORT, THIS = range(1, 7)
CHAT = (
    "{{ bos_token }}{% for turn in messages %} <user> {{ turn.content }}{% endfor %}"
    "{% if add_generation_prompt %} <assistant>{% endif %}"
)
BYTES = {0x2D: "-", 0x35: "5", 0x88: "Ī", 0x92: "Ĵ", 0xE2: "â"}
"""A byte → its stand-in character in byte-level vocabularies."""

Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def save(tokenizer: Tokenizer, **settings: object) -> Path:
        from transformers import PreTrainedTokenizerFast

        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings).save_pretrained(tmp_path)
        return tmp_path

    return save


def word_tokenizer(*, adds_bos: bool = True) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


@pytest.fixture
def words(save: Save) -> Path:
    return save(word_tokenizer(), bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=CHAT)


@pytest.mark.parametrize("text", ["sort this", "<s>sort this", "<s> sort this"])
def test_a_prompt_begins_with_bos_exactly_once(words: Path, text: str):
    assert PromptTokenizer(words, chat=False).encode(text) == [BOS, SORT, THIS]


def test_a_tokenizer_that_adds_no_bos_gets_none(save: Save):
    folder = save(word_tokenizer(adds_bos=False), bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    assert PromptTokenizer(folder, chat=False).encode("sort this") == [SORT, THIS]


def test_a_tokenizer_without_bos_reads_a_prompt_as_it_is(save: Save):
    folder = save(word_tokenizer(adds_bos=False), eos_token="</s>", unk_token="<unk>")
    assert PromptTokenizer(folder, chat=False).encode("sort this") == [SORT, THIS]


def test_the_chat_template_is_applied_once_and_its_special_tokens_are_not_doubled(words: Path):
    assert PromptTokenizer(words, chat=True).encode("sort this") == [BOS, USER, SORT, THIS, ASSISTANT]


def test_a_chat_template_without_bos_is_taken_at_its_word(save: Save):
    template = CHAT.removeprefix("{{ bos_token }}")
    folder = save(word_tokenizer(), bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template)
    assert PromptTokenizer(folder, chat=True).encode("sort") == [USER, SORT, ASSISTANT]


@pytest.mark.parametrize("named", ["TokenizersBackend", "PreTrainedTokenizerFast", "GPT2Tokenizer"])
def test_the_tokenizer_is_the_one_that_transformers_chooses(words: Path, named: str):
    from transformers import AutoTokenizer

    file = words / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": named}))
    chosen = AutoTokenizer.from_pretrained(words)
    tokenizer = PromptTokenizer(words, chat=True)
    assert type(tokenizer._tokenizer) is type(chosen)
    assert tokenizer.encode("sort this") == chosen.apply_chat_template(
        [{"role": "user", "content": "sort this"}], add_generation_prompt=True, return_dict=False
    )


def test_chat_without_a_template_is_refused(save: Save):
    folder = save(word_tokenizer(), bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    with pytest.raises(ModelError, match=r"data\.chat = false"):
        PromptTokenizer(folder, chat=True)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match=r"no tokenizer that can be loaded"):
        PromptTokenizer(tmp_path, chat=False)


@pytest.mark.parametrize(
    ("ends", "stops"), [(None, [EOS]), (EOS, [EOS]), (5, [EOS, 5]), ([5, EOS], [EOS, 5]), ([4, 5], [EOS, 4, 5])]
)
def test_stop_tokens_are_those_of_the_tokenizer_and_of_the_generation_settings(
    words: Path, ends: int | list[int] | None, stops: list[int]
):
    (words / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert PromptTokenizer(words, chat=False).stop_token_ids == stops


def test_a_model_without_generation_settings_stops_at_the_tokenizers_end(words: Path):
    assert not (words / "generation_config.json").exists()
    assert PromptTokenizer(words, chat=False).stop_token_ids == [EOS]


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_settings_that_cannot_be_read_are_named(words: Path, name: str):
    (words / name).write_text('{"eos_token_id": [2,')
    with pytest.raises(ModelError, match=f"{name} cannot be read"):
        _ = PromptTokenizer(words, chat=False).stop_token_ids


def test_a_model_without_any_end_token_stops_nowhere(save: Save):
    folder = save(word_tokenizer(adds_bos=False), unk_token="<unk>")
    assert PromptTokenizer(folder, chat=False).stop_token_ids == []


def test_decoding_leaves_special_tokens_out(words: Path):
    assert PromptTokenizer(words, chat=False).decode([BOS, SORT, THIS, EOS]) == "sort this"


def byte_tokenizer() -> Tokenizer:
    """Two tokens for the three bytes of a minus sign and the one of "5": the split falls inside the character."""
    pairs = [(BYTES[0xE2], BYTES[0x88]), (BYTES[0x92], BYTES[0x35])]
    vocabulary = {piece: number for number, piece in enumerate([*BYTES.values(), *("".join(pair) for pair in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_a_character_split_over_two_tokens_is_whole_when_they_are_decoded_together(save: Save):
    # case G6-15: e2 88 | 92 35 is U+2212, then 5
    tokenizer = PromptTokenizer(save(byte_tokenizer()), chat=False)
    token_ids = tokenizer.encode("\N{MINUS SIGN}5")
    assert len(token_ids) == 2
    assert tokenizer.decode(token_ids) == "\N{MINUS SIGN}5"
    assert "\N{REPLACEMENT CHARACTER}" in "".join(tokenizer.decode([token]) for token in token_ids)


@pytest.mark.parametrize("cleans_up", [True, False])
def test_decoding_leaves_the_spaces_of_the_text_alone(save: Save, cleans_up: bool):
    """Graders of code and formats see what the model wrote."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, " ": 1, ".": 2, "'s": 3}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer.decoder = decoders.Fuse()
    folder = save(tokenizer, clean_up_tokenization_spaces=cleans_up)
    assert PromptTokenizer(folder, chat=False).decode([0, 1, 2, 1, 0, 1, 3]) == "a . a 's"
