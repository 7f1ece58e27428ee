"""Scores of a reward model: transformers' own, read at the last token, whatever lies beside a sequence."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from tiny_models import SMALL
from towline.storage.errors import ModelError
from towline.trainer.packing import TokenSequence, pack, pack_pieces
from towline.trainer.packing_pairs import lay_out_pairs
from towline.trainer.packing_rows import pad_rows
from towline.trainer.reward_losses import pair_reward_loss
from towline.trainer.sequence_head import load_reward_model, padding_token
from towline.trainer.token_examples import TokenPair

pytestmark = pytest.mark.slow

EOS, UNKNOWN = 2, 0
OPTIONS = {**SMALL, "initializer_range": 0.2, "eos_token_id": EOS, "bos_token_id": 1}


def write_tokenizer(folder, **special):
    words = {f"w{number}": number for number in range(SMALL["vocab_size"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        **({"unk_token": "w0", "bos_token": "w1", "eos_token": "w2", "pad_token": "w2"} | special),
    )
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    """A causal language model whose texts end with the token that it pads with, as of many instruct models."""
    folder = tmp_path_factory.mktemp("causal")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**OPTIONS, pad_token_id=EOS)).save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    return folder


def write_scorer(folder, **options):
    torch.manual_seed(1)
    settings = {**OPTIONS, "num_labels": 1, "pad_token_id": EOS} | options
    LlamaForSequenceClassification(LlamaConfig(**settings)).save_pretrained(folder)
    write_tokenizer(folder)


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scorer")
    write_scorer(folder)
    return folder


def load(folder, **options):
    return load_reward_model(folder, **({"precision": "float32", "head_seed": 0} | options))


def sequences(seed=0):
    """Some end with the end-of-text token, some have it inside."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(3, 300, length) for length in (9, 4, 17, 6)]
    texts[0][-1] = texts[1][-1] = EOS
    texts[2][5] = EOS
    return [TokenSequence(token_ids=text, num_prompt_tokens=3) for text in texts]


def own_score(model, token_ids):
    """transformers', of a text alone; it is told of no padding token, so that it reads the last one."""
    pad, model.config.pad_token_id = model.config.pad_token_id, None
    try:
        return model(input_ids=torch.from_numpy(token_ids)[None], use_cache=False).logits[0, 0]
    finally:
        model.config.pad_token_id = pad


@pytest.fixture(scope="module")
def wanted(scorer):
    model = AutoModelForSequenceClassification.from_pretrained(scorer)
    with torch.no_grad():
        return torch.stack([own_score(model, sequence.token_ids) for sequence in sequences()])


# --- scores ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_scores_are_those_of_transformers(scorer, wanted):
    reward_model = load(scorer)
    for sequence, score in zip(sequences(), wanted, strict=True):
        batch = pack([sequence])
        torch.testing.assert_close(reward_model(batch, batch.last_index), score[None], rtol=1e-5, atol=1e-5)
    assert wanted.std() > 0.1


@torch.no_grad()
@pytest.mark.parametrize("packing", ["packed", "buckets"])
def test_scores_do_not_depend_on_what_a_sequence_lies_beside(scorer, wanted, packing):
    batch = pack(sequences()) if packing == "packed" else pad_rows(sequences())
    reward_model = load(scorer, packing=packing)
    assert reward_model.shares_prompts == (packing == "packed")
    torch.testing.assert_close(reward_model(batch, batch.last_index), wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_both_completions_of_a_pair_are_scored_after_one_prompt(scorer):
    reward_model = load(scorer)
    prompt, tails = [5, 6, 7], [[8, 9, EOS], [10], [EOS], [11, 12]]
    items = [TokenSequence(token_ids=np.array(prompt + tail), num_prompt_tokens=3) for tail in tails]
    shared = pack_pieces([items[:2], items[2:]])
    alone = torch.cat([reward_model(pack([item]), pack([item]).last_index) for item in items])
    assert shared.shares_prompts
    torch.testing.assert_close(reward_model(shared, shared.last_index), alone, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_score_is_read_at_the_last_token_whatever_the_padding(scorer):
    """G3-42: [5, 2, 6, 7] with 2 for padding and for the end of text, padded right or left, or not at all."""
    text = np.array([5, 2, 6, 7])
    batch = pack([TokenSequence(token_ids=text, num_prompt_tokens=1)])
    assert batch.last_index.tolist() == [3]
    model = AutoModelForSequenceClassification.from_pretrained(scorer)
    score = load(scorer)(batch, batch.last_index)
    torch.testing.assert_close(score, own_score(model, text)[None], rtol=1e-5, atol=1e-5)
    rows = pad_rows([TokenSequence(token_ids=text, num_prompt_tokens=1), *sequences()])
    found = load(scorer, packing="buckets")(rows, rows.last_index)
    torch.testing.assert_close(found[:1], score, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_steps_are_scored_where_they_end(scorer):
    """As a text that is cut there: nothing after a step has a say in it."""
    reward_model, (first, *_) = load(scorer), sequences()
    batch = pack(sequences())
    ends = np.array([1, 3, 5])
    cut = [TokenSequence(token_ids=first.token_ids[: 3 + end + 1], num_prompt_tokens=3) for end in ends]
    alone = torch.cat([reward_model(pack([item]), pack([item]).last_index) for item in cut])
    torch.testing.assert_close(reward_model(batch, batch.completion_index[ends]), alone, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_bf16_scores_are_float32_and_tell_small_margins_apart(scorer, wanted):
    reward_model = load(scorer, precision="bfloat16")
    batch = pack(sequences())
    scores = reward_model(batch, batch.last_index)
    assert scores.dtype is torch.float32
    assert (scores - scores.bfloat16().float()).abs().max() > 0
    torch.testing.assert_close(scores, wanted, rtol=0.05, atol=0.1)


def test_a_dummy_gives_every_parameter_a_gradient_of_zeros(scorer):
    reward_model = load(scorer)
    batch = pack([])
    reward_model(batch, batch.last_index).sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in reward_model.parameters())


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_gradient_of_a_packed_step_is_that_of_pairs_alone(scorer, gradient_checkpointing):
    rng = np.random.default_rng(3)
    pairs = []
    for prompt_tokens, *lengths in [(3, 5, 2), (6, 1, 9), (2, 4, 4)]:
        prompt = rng.integers(3, 300, prompt_tokens)
        items = [
            TokenSequence(
                token_ids=np.concatenate([prompt, rng.integers(3, 300, length)]), num_prompt_tokens=prompt_tokens
            )
            for length in lengths
        ]
        pairs.append(TokenPair(row=0, margin=None, chosen=items[0], rejected=items[1]))

    def gradient(micro_batches, shares_prompts):
        reward_model = load(scorer, gradient_checkpointing=gradient_checkpointing).train()
        for members in micro_batches:
            batch = lay_out_pairs(members, is_padded=False, shares_prompts=shares_prompts)
            chosen_P, rejected_P = reward_model(batch, batch.last_index).view(-1, 2).unbind(1)
            (pair_reward_loss(chosen_P, rejected_P, centring=0.01).sum() / 3).backward()
        return torch.cat([weight.grad.flatten() for weight in reward_model.parameters()])

    alone = gradient([[pair] for pair in pairs], shares_prompts=False)
    for shares_prompts in (True, False):
        assert (gradient([pairs], shares_prompts) - alone).norm() < 1e-5 * alone.norm()


# --- heads and folders -------------------------------------------------------------------------------------------


def test_a_causal_model_gets_a_head_from_its_seed_and_that_is_said(causal, capsys):
    reward_model = load(causal, head_seed=7)
    assert reward_model.is_fresh_head
    assert "has no score head: a new one is drawn from seed 7" in capsys.readouterr().out
    head = reward_model.model.score.weight
    assert head.std().item() == pytest.approx(0.2, rel=0.3)
    assert torch.equal(head, load(causal, head_seed=7).model.score.weight)
    assert not torch.equal(head, load(causal, head_seed=8).model.score.weight)
    body = LlamaForCausalLM.from_pretrained(causal).model.state_dict()
    assert all(torch.equal(weight, body[name]) for name, weight in reward_model.model.model.state_dict().items())


def test_a_reward_model_keeps_its_head(scorer, capsys):
    reward_model = load(scorer, head_seed=7)
    assert not reward_model.is_fresh_head
    assert capsys.readouterr().out == ""
    kept = AutoModelForSequenceClassification.from_pretrained(scorer).score.weight
    assert torch.equal(reward_model.model.score.weight, kept)


@pytest.mark.parametrize("score_of", ["completion", "step"])
def test_its_folder_says_what_a_score_is_of(scorer, tmp_path, score_of):
    load(scorer, score_of=score_of).model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["score_of"] == score_of
    assert load(tmp_path).model.config.score_of == "completion"


def test_texts_do_not_end_with_what_is_padded_with(causal, tmp_path):
    assert padding_token(causal) == UNKNOWN
    config = json.loads((causal / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tokenizer(tmp_path, pad_token="w9")
    assert padding_token(tmp_path) == 9
    write_tokenizer(tmp_path, unk_token="w2", extra_special_tokens=["w5"])
    assert padding_token(tmp_path) == 5


def test_a_tokenizer_without_a_token_to_pad_with_is_refused(causal, tmp_path):
    (tmp_path / "config.json").write_text((causal / "config.json").read_text())
    write_tokenizer(tmp_path, unk_token="w1")
    with pytest.raises(ModelError, match="no special token to pad with"):
        padding_token(tmp_path)


def test_a_model_with_two_scores_is_refused(tmp_path):
    write_scorer(tmp_path, num_labels=2)
    with pytest.raises(ModelError, match=r"score.weight \(2, 64\), expected score.weight \(1, 64\)"):
        load(tmp_path)


def test_a_folder_that_lacks_weights_is_refused(causal, tmp_path):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**OPTIONS, pad_token_id=EOS)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tokenizer(tmp_path)
    with pytest.raises(ModelError, match=r"lacks the weights model\.layers\.2"):
        load(tmp_path)


def test_no_folder_at_all_is_refused(tmp_path):
    write_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(tmp_path)


def test_a_model_that_cannot_be_packed_is_refused(tmp_path):
    """Its window is wider than any text of the proof, and would be left out."""
    torch.manual_seed(0)
    MistralForCausalLM(MistralConfig(**OPTIONS, sliding_window=8)).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="sliding_window"):
        load(tmp_path)
    assert load(tmp_path, packing="buckets").is_fresh_head


def test_an_attention_that_looks_at_other_sequences_is_refused(scorer):
    def leaky(module, query, key, value, attention_mask, scaling=None, **others):
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register("leaky", leaky)
    with pytest.raises(ModelError, match="moved logits of another"):
        load(scorer, attention="leaky")
