"""A reward model under every ZeRO stage, over gloo, under a real mpirun: trained, kept, taken up again, and read by
transformers. reward_worker.py does it on one rank and on two."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from launches import launch_ranks, wait_for_all
from tiny_models import sharded_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORKER = Path(__file__).parent / "reward_worker.py"
CASES = [f"zero{stage}-float32" for stage in (0, 1, 2, 3)] + ["zero3-bfloat16"]
every_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    sharded_llama(0).save_pretrained(folder / "start")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(1600)}, unk_token="w0"))
    # It pads with the token that every completion ends with.
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w0", eos_token="w1", bos_token="w2", pad_token="w1"
    ).save_pretrained(folder / "start")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for ranks in (1, 2):
        log = folder / f"{ranks}.log"
        wait_for_all({log: launch_ranks(WORKER, ranks, log, folder, f"127.0.0.1:{store.port}")}, 300)
    return folder


def found(folder, ranks, case):
    return json.loads((folder / f"found-{ranks}" / f"{case}.json").read_text())


@every_case
def test_the_number_of_ranks_and_the_stage_change_neither_loss_nor_gradient(folder, case):
    """And it is learnt: the loss falls."""
    is_float32 = case.endswith("float32")
    wanted = found(folder, 1, "zero0-float32")
    tolerance = 1e-5 if is_float32 else 0.1
    for ranks in (1, 2):
        values = found(folder, ranks, case)
        assert values["losses"] == pytest.approx(wanted["losses"], rel=tolerance)
        assert values["norms"] == pytest.approx(wanted["norms"], rel=1e-4 if is_float32 else 0.2)
        assert values["losses"][-1] < 0.7 * values["losses"][0]


@every_case
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reward_model_that_is_taken_up_goes_on_alike(folder, ranks, case):
    values = found(folder, ranks, case)
    assert values["loaded"] == values["scores"] != values["other"]
    assert values["next"][0] == values["next"][1]


@every_case
@pytest.mark.parametrize("ranks", [1, 2])
def test_transformers_reads_the_same_scores_whatever_the_padding(folder, ranks, case):
    """G3-42: every completion ends with what the first tokenizer padded with."""
    hf = folder / f"checkpoints-{ranks}" / case / "step-000004" / "hf"
    model = AutoModelForSequenceClassification.from_pretrained(hf, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(hf)
    assert model.config.architectures == ["LlamaForSequenceClassification"]
    assert model.config.num_labels == 1
    assert tokenizer.pad_token_id == model.config.pad_token_id == 0
    texts = json.loads((folder / "texts.json").read_text())
    wanted = torch.tensor(found(folder, ranks, case)["scores"])
    tolerance = 1e-5 if case.endswith("float32") else 0.05
    for side in ("right", "left"):
        inputs = tokenizer.pad({"input_ids": texts}, padding_side=side, return_tensors="pt")
        with torch.no_grad():
            scores = model(**inputs).logits[:, 0]
        torch.testing.assert_close(scores, wanted, rtol=tolerance, atol=tolerance)
