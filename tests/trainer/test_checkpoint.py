"""Checkpoints of real DeepSpeed trainers, over gloo, under a real mpirun: what is saved goes on to the bit in another
process, also with another number of ranks as far as arithmetic allows, and what does not fit is refused by name.
checkpoint_worker.py saves in one launch for each number of ranks and loads in another; the tests compare."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from launches import launch_ranks, wait_for_all
from small_disk import small_disk
from tiny_models import sharded_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORKER = Path(__file__).parent / "checkpoint_worker.py"
LAUNCH_TIMEOUT_S = 400
GENERATION = '{"eos_token_id": 1, "temperature": 0.5}'
"""As some models have it; transformers reads it and would not write it, for want of do_sample."""
STAGES, PRECISIONS = (0, 1, 2, 3), ("float32", "bfloat16")
every_case = pytest.mark.parametrize(("stage", "precision"), [(s, p) for p in PRECISIONS for s in STAGES])
every_change = pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 1), (1, 2)])


def word_tokenizer():
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(1600)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for message in messages %}w5 {{ message['content'] }} w6{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1", chat_template=template)


# --- the launches ------------------------------------------------------------------------------------------------


class Found:
    """What the workers left, by phase, number of ranks and case."""

    def __init__(self, folder):
        self.folder = folder

    def values(self, phase, ranks, name, rank=0):
        return json.loads((self.folder / "found" / f"{phase}-{ranks}" / f"{name}.{rank}.json").read_text())

    def arrays(self, phase, ranks, name):
        with np.load(self.folder / "found" / f"{phase}-{ranks}" / f"{name}.npz") as stored:
            return dict(stored)

    def checkpoint(self, name):
        return self.folder / "checkpoints" / name / "step-000005"


def run_phase(phase, folder, address):
    logs = {ranks: folder / f"{phase}-{ranks}.log" for ranks in (1, 2)}
    launches = {log: launch_ranks(WORKER, ranks, log, phase, folder, address) for ranks, log in logs.items()}
    wait_for_all(launches, LAUNCH_TIMEOUT_S)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    for seed, weights in enumerate(("start", "other")):
        for tied in (True, False):
            sharded_llama(seed, tied=tied).save_pretrained(folder / f"{weights}-{'tied' if tied else 'untied'}")
    word_tokenizer().save_pretrained(folder / "start-tied")
    (folder / "start-tied" / "generation_config.json").write_text(GENERATION)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Room for one checkpoint of the tiny model and a half.
    with small_disk(folder / "small", "20m") as is_mounted:
        if not is_mounted:
            (folder / "small").rmdir()
        for phase in ("save", "load"):
            run_phase(phase, folder, f"127.0.0.1:{store.port}")
        yield Found(folder)


def case_name(stage, precision, ranks):
    return f"zero{stage}-{precision}-by{ranks}"


def assert_same_bits(found, wanted, prefix=""):
    assert found.keys() == wanted.keys()
    names = [name for name in wanted if name.startswith(prefix)]
    assert names
    for name in names:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


# --- as many ranks as before -------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_equals_the_undisturbed_one_to_the_bit(found, stage, precision, ranks):
    """Weights, master weights and moments, as loaded and after each of two steps whose loss draws random numbers."""
    name = case_name(stage, precision, ranks)
    straight, resumed = found.arrays("save", ranks, name), found.arrays("load", ranks, name)
    assert_same_bits(resumed, straight)
    for rank in range(ranks):
        wanted, got = found.values("save", ranks, name, rank), found.values("load", ranks, name, rank)
        assert {key: got[key] for key in wanted} == wanted
    moved = np.abs(straight["2/weight/model.norm.weight"] - straight["0/weight/model.norm.weight"]).max()
    assert moved > 1e-5 or precision == "bfloat16"


@every_case
def test_each_rank_goes_on_with_its_own_random_numbers(found, stage, precision):
    name = case_name(stage, precision, 2)
    first, second = (found.values("load", 2, name, rank)["draws"] for rank in (0, 1))
    assert not set(first) & set(second)


@every_case
def test_the_state_comes_back_as_it_was_given(found, stage, precision):
    saved = found.values("load", 2, case_name(stage, precision, 2))["state"]
    assert (saved["step"], saved["branch"], saved["version"], saved["ranks"]) == (5, 1, 5, 2)
    assert (saved["zero_stage"], saved["precision"], saved["stream_digest"]) == (stage, precision, "ab12")


# --- another number of ranks -------------------------------------------------------------------------------------


@every_case
@every_change
def test_another_number_of_ranks_takes_up_equal_weights_and_moments(found, stage, precision, saved_by, loaded_by):
    name = case_name(stage, precision, saved_by)
    saved, loaded = found.arrays("save", saved_by, name), found.arrays("load", loaded_by, name)
    assert_same_bits(loaded, saved, "0/")
    assert found.values("load", loaded_by, name)["steps_taken"] == found.values("save", saved_by, name)["steps_taken"]


@every_case
@every_change
def test_another_number_of_ranks_goes_on_nearly_as_before(found, stage, precision, saved_by, loaded_by):
    name = case_name(stage, precision, saved_by)
    wanted, got = found.values("save", saved_by, f"{name}-quiet"), found.values("load", loaded_by, name)
    # bfloat16: a weight may round to its other neighbour
    relative = 1e-6 if precision == "float32" else 2e-3
    assert got["losses"] == pytest.approx(wanted["losses"], rel=relative)
    before, after = found.arrays("save", saved_by, f"{name}-quiet"), found.arrays("load", loaded_by, name)
    for key in (key for key in before if key.startswith("2/exp_avg/")):
        assert np.abs(before[key] - after[key]).max() <= 100 * relative * np.abs(before[key]).max(), key


@every_case
@every_change
def test_the_checkpoint_after_a_change_of_ranks_is_one_as_any_other(found, stage, precision, saved_by, loaded_by):
    for rank in range(loaded_by):
        again = found.values("load", loaded_by, f"{case_name(stage, precision, saved_by)}-again", rank)
        assert again["differing"] == []
        assert again["losses"][0] == again["losses"][1]


@every_change
def test_a_change_of_ranks_is_told(found, saved_by, loaded_by):
    log = (found.folder / f"load-{loaded_by}.log").read_text()
    assert f"checkpoint of step 5: written by {saved_by} ranks, taken up by {loaded_by}." in log
    assert log.count("bits may differ from the undisturbed run") == len(STAGES) * len(PRECISIONS)


def test_after_a_change_of_ranks_random_numbers_are_seeded_by_rank(found):
    draws = [
        [found.values("load", 2, case_name(stage, "float32", 1), rank)["draws"] for stage in STAGES] for rank in (0, 1)
    ]
    assert all(other == draws[0][0] for other in draws[0])
    assert all(other == draws[1][0] for other in draws[1])
    assert not set(draws[0][0]) & set(draws[1][0])


def test_nothing_of_the_conversion_is_left(found):
    assert [path for path in (found.folder / "checkpoints").rglob("*universal*")] == []


# --- the Hugging Face folder -------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_model_folder_holds_the_policy(found, stage, precision, ranks):
    name = case_name(stage, precision, ranks)
    engine, folder = found.arrays("save", ranks, name), found.checkpoint(name) / "hf"
    stored = load_file(folder / "model.safetensors")
    weights = {key.removeprefix("0/weight/"): value for key, value in engine.items() if key.startswith("0/weight/")}
    assert stored.keys() == weights.keys()
    for key, value in weights.items():
        assert stored[key].dtype is getattr(torch, precision), key
        np.testing.assert_array_equal(stored[key].float().numpy(), value, err_msg=key)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    assert model.config.tie_word_embeddings == (stage in (0, 2))
    ids = torch.arange(1, 30)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
    np.testing.assert_allclose(engine["0/logprobs"], logprobs, atol=1e-5 if precision == "float32" else 0.1)


def test_the_model_folder_holds_tokenizer_and_chat_template(found):
    folder = found.checkpoint(case_name(3, "bfloat16", 2)) / "hf"
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    messages = [{"role": "user", "content": "w7 w8"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "w5 w7 w8 w6"
    assert tokenizer("w7 w8").input_ids == [7, 8]
    assert (folder / "generation_config.json").read_text() == GENERATION
    config = json.loads((folder / "config.json").read_text())
    original = json.loads((found.folder / "start-untied" / "config.json").read_text())
    assert config == original | {"dtype": "bfloat16"}


# --- whole or not at all -----------------------------------------------------------------------------------------


def test_the_newest_are_kept_and_a_step_saved_twice_is_written_once_unless_it_changed(found):
    values = found.values("save", 2, "several")
    assert values["kept"] == [2, 3]
    assert not values["torn"]
    assert not values["rewritten_same"]
    assert values["branch"] == 9
    assert values["told"] > 5


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_full_disk_leaves_the_earlier_checkpoint_whole_and_is_reported_on_every_rank(found, stage):
    if not (found.folder / "small").is_dir():
        pytest.skip("mounting a small file system is refused")
    for rank in (0, 1):
        values = found.values("load", 2, f"full-zero{stage}", rank)
        assert f"small/zero{stage}/step-000002 could not be written" in values["message"]
        assert "bytes are free" in values["message"]
        assert values["complete"] == [1]
        assert values["folders"] == ["step-000001"]
        assert values["problems"] == []
        assert np.isfinite(values["loss"])


# --- refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("changed-kl_beta", ["KL coefficient: the checkpoint has 0.04, this run 0.0"]),
        ("changed-seed", ["seed: the checkpoint has 7, this run 8"]),
        ("changed-data", ["data cursor (dataset and schedule)"]),
        ("changed-reference", ["reference: the checkpoint has 'sft-1', this run 'sft-2'"]),
        ("changed-zero_stage", ["optimiser state (ZeRO stage): the checkpoint has 2, this run 3"]),
        ("changed-precision", ["precision: the checkpoint has 'float32', this run 'bfloat16'"]),
        ("changed-optimizer", ["optimiser state (adam_betas)"]),
        ("changed-several", ["seed: ", "KL coefficient: "]),
        ("truncated", ["engine/zero_pp_rank_1_mp_rank_00_optim_states.pt has "]),
        ("flipped", ["engine/zero_pp_rank_1_mp_rank_00_optim_states.pt was changed"]),
        ("missing-rng", ["rng/rank-1.json is missing"]),
        ("missing-hf", ["hf/model.safetensors is missing"]),
        ("unmarked", ["no whole checkpoint of step 5"]),
    ],
)
def test_what_does_not_fit_or_is_damaged_is_refused_by_name_on_every_rank(found, case, named):
    for rank in (0, 1):
        message = found.values("load", 2, "refusals", rank)["messages"][case]
        assert all(part in message for part in named), message
        assert message.count("\n  - ") == len(named), message


def test_a_refusal_leaves_the_engine_as_it_was(found):
    assert found.values("load", 2, "refusals")["touched"] == []
