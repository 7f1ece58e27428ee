"""GRPO, Dr. GRPO, DAPO and RLOO each learn, over three seeds: twelve learnings with real parts, see `learning.py`.

The table is printed with `pytest -s`; other seeds: `python tests/integration/learning.py --seeds 3 4 5`.
"""

import pytest

from integration.learning import MEMBERS, SEEDS, learn, pooled_difference, table
from integration.runs import MODEL
from towline.trainer.tripwires import Tripwires

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1600),
    pytest.mark.skipif(not MODEL.is_dir(), reason="models/tiny-sort is missing: run env/setup.sh"),
]
HELD_OUT_PROMPTS = 400


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    learned = learn(list(MEMBERS), SEEDS, tmp_path_factory.mktemp("learning"))
    print(f"\n{table(learned)}")
    return learned


@pytest.mark.parametrize("member", MEMBERS)
def test_held_out_accuracy_rises(learned, member):
    assert all(len(one.before) == len(one.after) == HELD_OUT_PROMPTS for one in learned[member])
    assert pooled_difference(learned[member]).low > 0.1
    for one in learned[member]:
        assert one.difference.low > 0.02, f"seed {one.seed}: {one.difference}"


@pytest.mark.parametrize("member", MEMBERS)
def test_a_learning_that_goes_well_trips_no_wire(learned, member):
    has_reference = "trainer.kl_beta=0" not in MEMBERS[member]
    for one in learned[member]:
        tripwires = Tripwires(
            engine_precision="float32",
            kl_beta=0.04 if has_reference else 0.0,
            precision="float32",
            is_exact=True,
        )
        said = [text for step, row in enumerate(one.rows) for text in tripwires.judge(step, row)[1]]
        assert said == [], f"seed {one.seed}"


@pytest.mark.parametrize("member", MEMBERS)
def test_each_step_begins_on_policy_and_leaves_it_until_tokens_are_clipped(learned, member):
    rows = [row for one in learned[member] for row in one.rows]
    assert all(row["loss/clipped_first"] == 0 and row["mismatch/k3"] < 1e-9 for row in rows)
    assert all(0 < row["loss/clipped"] < 0.2 for row in rows)


def test_dapo_draws_further_waves_until_its_batches_are_full(learned):
    rows = [row for one in learned["DAPO"] for row in one.rows]
    assert {row["rollouts/waves"] for row in rows} > {1.0}
    assert all(row["rollouts/useful"] >= 32 or row["rollouts/waves"] == 3 for row in rows)
