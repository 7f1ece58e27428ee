"""Chat templates of public models, as trl ships them: what each of them teaches of one conversation."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken

from chat_tokenizers import byte_tokenizer
from towline.rollout.tokenizing import PromptTokenizer
from towline.storage.errors import DataError
from towline.storage.example_config import Turns
from towline.storage.records import Demonstration, Turn
from towline.trainer.conversation import ConversationTokenizer

TURNS = (
    Turn(role="user", content="hi?"),
    Turn(role="assistant", content="yes."),
    Turn(role="user", content="so?"),
    Turn(role="assistant", content="no."),
)


def template(name: str) -> str:
    trl = importlib.util.find_spec("trl")
    path = Path(trl.origin or "").parent / "chat_templates" / f"{name}.jinja" if trl else None
    if path is None or not path.exists():
        pytest.skip(f"trl's {name}.jinja is not here")
    return path.read_text()


def load(folder: Path, name: str, special: tuple[str, ...], stops: tuple[str, ...]) -> ConversationTokenizer:
    """
    Args:
        stops: of the generation settings; the last is the tokenizer's own end.
    """
    from transformers import PreTrainedTokenizerFast

    tokens = byte_tokenizer()
    tokens.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*special, *stops)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, bos_token="<s>", eos_token=stops[-1], chat_template=template(name)
    )
    tokenizer.save_pretrained(folder)
    ids = [tokenizer.convert_tokens_to_ids(stop) for stop in stops]
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')
    return ConversationTokenizer(folder, chat=True)


def learned(tokenizer: ConversationTokenizer, turns: tuple[Turn, ...], which: Turns = "all") -> str:
    example = tokenizer.demonstration(Demonstration(row=0, turns=turns), turns=which)
    completion = example.tokens.token_ids[example.tokens.num_prompt_tokens :]
    assert example.trained[-1]
    return tokenizer.decode(list(completion[np.flatnonzero(example.trained)]))


CHATML = ("<|im_start|>",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "special", "stops", "end"),
    [
        ("qwen2_5", CHATML, ("<|im_end|>",), "<|im_end|>"),
        ("qwen3_instruct_2507", CHATML, ("<|endoftext|>", "<|im_end|>"), "<|im_end|>"),
        ("llama3", ("<|start_header_id|>", "<|end_header_id|>"), ("<|end_of_text|>", "<|eot_id|>"), "<|eot_id|>"),
        ("gemma", ("<start_of_turn>",), ("<end_of_turn>", "<eos>"), "<end_of_turn>"),
        ("phi3", ("<|user|>", "<|assistant|>"), ("<|end|>", "<|endoftext|>"), "<|end|>"),
        (
            "cohere2",
            ("<|END_RESPONSE|>", "<|START_RESPONSE|>"),
            ("<|END_OF_TURN_TOKEN|>",),
            "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        ),
    ],
)
def test_every_turn_is_learned_with_the_end_that_the_engine_stops_at(
    tmp_path: Path, name: str, special: tuple[str, ...], stops: tuple[str, ...], end: str
):
    tokenizer = load(tmp_path, name, special, stops)
    assert learned(tokenizer, TURNS) == f"yes.{end}no.{end}"
    assert learned(tokenizer, TURNS, "last") == f"no.{end}"
    prompt = tokenizer.demonstration(Demonstration(row=0, turns=TURNS[:2])).tokens
    wanted = PromptTokenizer(tmp_path, chat=True).encode("hi?")
    assert prompt.token_ids[: prompt.num_prompt_tokens].tolist() == wanted


@pytest.mark.slow
def test_qwen3_leaves_thinking_out_and_teaches_the_last_turn_only(tmp_path: Path):
    tokenizer = load(tmp_path, "qwen3", CHATML, ("<|endoftext|>", "<|im_end|>"))
    with pytest.raises(DataError, match=r'writes turn 1 \(from 0\) otherwise than it was generated.*turns = "last"'):
        learned(tokenizer, TURNS)
    assert learned(tokenizer, TURNS, "last") == "<think>\n\n</think>\n\nno.<|im_end|>"
    thought = (*TURNS[:3], Turn(role="assistant", content="<think>\nhm\n</think>\n\nno."))
    assert learned(tokenizer, thought, "last") == "<think>\nhm\n</think>\n\nno.<|im_end|>"


@pytest.mark.slow
def test_a_model_whose_generation_prompt_begins_to_think_is_refused(tmp_path: Path):
    tokenizer = load(tmp_path, "deepseek_r1_distill", (), ("</s>",))
    with pytest.raises(DataError, match=r"does not write the last turn after the prompt that it opens.*chat = false"):
        learned(tokenizer, TURNS[:2])
