"""A whole run of adapters: real engines, which get merged weights and know nothing of LoRA."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from integration.runs import MODEL, ROOT, LiveRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_dir(), reason="models/tiny-sort is missing: run env/setup.sh"),
]
OPTIONS = (
    "trainer.lora.rank=8", "trainer.learning_rate=2e-3", "trainer.warmup_steps=0", "trainer.zero_stage=3",
    "rollout.prompts_per_step=8",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three steps, and a fourth after a resume, which refuses weights whose stream is not the one that was saved."""
    folder = tmp_path_factory.mktemp("lora")
    few = (ROOT / "data" / "sort" / "held_out.jsonl").read_text().splitlines(keepends=True)[:8]
    (folder / "few.jsonl").write_text("".join(few))
    run = LiveRun(folder, "steps=3", f"evaluation.data.train={folder / 'few.jsonl'}", *OPTIONS)
    try:
        assert run.wait() == 0, run.text
        run.resume("steps=4")
        assert run.wait() == 0, run.text
        yield run
    finally:
        run.kill()


def test_engines_use_the_merged_weights(run):
    assert [row["step"] for row in run.rows] == [0, 1, 2, 3]
    for row in run.rows:
        assert row["mismatch/max_abs_logprob"] < 1e-4
        assert 0 <= row["mismatch/k3"] < 1e-9
        assert row["probe/new"] < 1e-4
        assert row["probe/old"] > 20 * row["probe/new"]
        assert row["probe/verdict"] == 1.0
        assert row["weights/moved"] > 0
        assert not any(value for name, value in row.items() if name.startswith("tripwire/"))


def test_the_reference_is_the_policy_before_its_first_step(run):
    assert run.rows[0]["loss/clipped_first"] == 0.0
    assert run.rows[0]["loss/kl"] == 0.0
    assert all(row["loss/kl"] > 1e-6 for row in run.rows[1:])


def test_the_checkpoint_holds_one_policy_in_two_forms(run):
    folder = run.folder / "checkpoints" / "step-000004"
    merged, plain, other = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
        for path in (folder / "hf", MODEL, MODEL)
    )
    adapted = PeftModel.from_pretrained(other, folder / "adapter").eval()
    ids = torch.arange(3, 30)[None] % merged.config.vocab_size
    with torch.no_grad():
        logits, wanted, before = (model(input_ids=ids).logits for model in (adapted, merged, plain))
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-4)
    assert (wanted - before).abs().max() > 0.01
