"""The ledger: every field of a rollout and of a score, whose file it is, and what a killed or hindered writer leaves.

SWMR is not used and files are never written twice, so three known faults of HDF5 cannot occur: a consistency flag left
by a dead writer (case G5-07), SWMR in the old file format (G5-10), and data that a re-opened handle does not see
(G5-18: a second write is refused, tested here). Nothing counts rows apart from the rows (G5-08): a file is there whole.
"""

import dataclasses
import multiprocessing
import pickle
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest

from small_disk import small_disk
from towline.storage.columns import write_columns
from towline.storage.errors import LedgerError
from towline.storage.ledger import (
    ScoreSheet,
    Shard,
    read_scored_shard,
    read_scores,
    read_shard,
    scores_path,
    seal_scores,
    seal_shard,
    sealed_chunks,
    sealed_steps,
)
from towline.storage.ledger_schema import SCORES
from towline.storage.records import (
    ChunkId,
    Completion,
    FinishReason,
    Prompt,
    RolloutGroup,
    Score,
    ScoreStatus,
    ShardOrigin,
)
from towline.storage.set_aside import orphans

NAN = float("nan")
ORIGIN = ShardOrigin(
    chunk=ChunkId(step=3, wave=1, chunk=2),
    branch=1,
    engine=4,
    attempt=2,
    weight_hashes={0: "", 10: "ab", 9: "cd"},
    sampling={"temperature": 0.1, "top_p": 1.0, "max_tokens": 64},
    began=1_700_000_000.123456,
    ended=1_700_000_001.5,
)


def completion(
    token_ids: list[int], *, text: str = "", seed: int = 0, reason: FinishReason = FinishReason.STOP, version: int = 0
) -> Completion:
    return Completion(
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=(-np.arange(1, len(token_ids) + 1) / 3).astype(np.float32),
        versions=np.full(len(token_ids), version, dtype=np.uint32),
        finish_reason=reason,
        seed=seed,
        text=text,
    )


def group(row: int, *completions: Completion, prompt_ids: tuple[int, ...] = (1,), text: str = "") -> RolloutGroup:
    return RolloutGroup(
        prompt=Prompt(row=row, text=text, answer=f"answer {row}"),
        prompt_token_ids=np.array(prompt_ids, dtype=np.int32),
        completions=completions,
    )


ODD_GROUPS = (
    group(
        7,
        completion([1, 2**31 - 1], text="a \udfff b", seed=2**63 - 1, version=2**32 - 1),
        completion([], reason=FinishReason.LENGTH),
        prompt_ids=(0, 65535, 65536, 151643, 2**31 - 1),
        text="π ≈ 3.14 数学 🙂 \ud800",
    ),
    group(2**40, prompt_ids=()),
    group(3, completion([5, 5, 5], text="数", reason=FinishReason.ABORTED, seed=1, version=7)),
)


def assert_same_groups(found: tuple[RolloutGroup, ...], expected: tuple[RolloutGroup, ...]) -> None:
    """Equal in every field; arrays in type and bits."""

    def plain(groups: tuple[RolloutGroup, ...]) -> list[object]:
        return [
            (
                group.prompt,
                bits(group.prompt_token_ids),
                [
                    (bits(c.token_ids), bits(c.logprobs), bits(c.versions), c.finish_reason, c.seed, c.text)
                    for c in group.completions
                ],
            )
            for group in groups
        ]

    def bits(array: np.ndarray) -> tuple[str, bytes]:
        return str(array.dtype), array.tobytes()

    assert plain(found) == plain(expected)


def sealed(path: Path, groups: tuple[RolloutGroup, ...] = ODD_GROUPS) -> Shard:
    seal_shard(path, groups, ORIGIN)
    return read_shard(path)


def score(total: float, **parts: float) -> Score:
    parts = parts or {"exact_match": total}
    return Score(
        parts=parts,
        part_status=dict.fromkeys(parts, ScoreStatus.OK),
        part_seconds=dict.fromkeys(parts, 0.25),
        total=total,
        status=ScoreStatus.OK,
        seconds=0.5,
    )


def sheet(shard_digest: str, *scores: Score, **weights: float) -> ScoreSheet:
    return ScoreSheet(
        scores=scores,
        weights=weights or {"exact_match": 1.0},
        code_hash="f00",
        shard_digest=shard_digest,
        began=2.25,
        ended=3.1,
    )


def run_python(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_field_of_a_shard_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "step-000003/wave-1/chunk-002.h5"
    digest = seal_shard(path, ODD_GROUPS, ORIGIN)
    shard = read_shard(path)
    assert_same_groups(shard.groups, ODD_GROUPS)
    assert shard.origin == ORIGIN
    assert shard.digest == digest
    first = shard.groups[0].completions[0]
    assert (first.seed, first.text, first.token_ids.tolist()) == (2**63 - 1, "a \udfff b", [1, 2**31 - 1])
    assert isinstance(first.finish_reason, FinishReason)


def test_a_shard_of_no_groups_comes_back(tmp_path: Path) -> None:
    assert sealed(tmp_path / "a.h5", ()).groups == ()


def test_a_shard_of_groups_without_completions_comes_back(tmp_path: Path) -> None:
    groups = (group(1, prompt_ids=(4, 5)), group(2))
    assert_same_groups(sealed(tmp_path / "a.h5", groups).groups, groups)


def test_shards_of_any_shape_come_back(tmp_path: Path) -> None:
    letters = ["a", "é", "数", "🙂", "\ud800", "\n", "\0"]
    for seed in range(15):
        rng = np.random.default_rng(seed)

        def text(rng: np.random.Generator = rng) -> str:
            return "".join(rng.choice(letters, rng.integers(0, 9)))

        def tokens(rng: np.random.Generator = rng) -> Completion:
            length = int(rng.integers(0, 30))
            return Completion(
                token_ids=rng.integers(0, 2**31, length, dtype=np.int32),
                logprobs=np.frombuffer(rng.bytes(4 * length), dtype=np.float32),  # any bits, NaN and denormal too
                versions=rng.integers(0, 2**32, length, dtype=np.uint32),
                finish_reason=FinishReason(int(rng.integers(0, 3))),
                seed=int(rng.integers(0, 2**63, dtype=np.uint64)),
                text=text(),
            )

        groups = tuple(
            RolloutGroup(
                prompt=Prompt(row=int(rng.integers(0, 2**62)), text=text(), answer=text()),
                prompt_token_ids=rng.integers(0, 2**31, rng.integers(0, 9), dtype=np.int32),
                completions=tuple(tokens() for _ in range(rng.integers(0, 5))),
            )
            for _ in range(rng.integers(0, 5))
        )
        assert_same_groups(sealed(tmp_path / f"{seed}.h5", groups).groups, groups)


def test_shards_longer_than_a_chunk_come_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    groups = (group(0, *(completion(rng.integers(0, 99, 20_000).tolist(), text="🙂" * 5000) for _ in range(2))),)
    assert_same_groups(sealed(tmp_path / "a.h5", groups).groups, groups)


def test_the_same_rollouts_have_the_same_digest(tmp_path: Path) -> None:
    digests = [seal_shard(tmp_path / f"{number}.h5", ODD_GROUPS, ORIGIN) for number in range(2)]
    assert digests[0] == digests[1]
    other = dataclasses.replace(ORIGIN, engine=5)
    assert seal_shard(tmp_path / "2.h5", ODD_GROUPS, other) != digests[0]


@pytest.mark.parametrize("field", ["token_ids", "logprobs", "versions"])
def test_a_completion_with_a_token_s_value_missing_is_refused(tmp_path: Path, field: str) -> None:
    whole = completion([1, 2, 3])
    short = dataclasses.replace(whole, **{field: getattr(whole, field)[:-1]})
    with pytest.raises(LedgerError, match=r"a\.h5: a completion has \(\d, \d, \d\) token ids, log-probs and versions"):
        seal_shard(tmp_path / "a.h5", (group(0, whole, short),), ORIGIN)
    assert list(tmp_path.iterdir()) == []


def test_a_token_id_or_seed_too_large_is_refused_and_never_wrapped(tmp_path: Path) -> None:
    wide = dataclasses.replace(completion([1]), token_ids=np.array([2**31], dtype=np.int64))
    for odd in (wide, completion([1], seed=2**63)):
        with pytest.raises(LedgerError, match="no int"):
            seal_shard(tmp_path / "a.h5", (group(0, odd),), ORIGIN)
    assert list(tmp_path.iterdir()) == []


def test_a_sealed_shard_is_not_replaced(tmp_path: Path) -> None:
    # case G5-18
    path = tmp_path / "a.h5"
    seal_shard(path, ODD_GROUPS, ORIGIN)
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        seal_shard(path, ODD_GROUPS[:1], ORIGIN)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_shard_needs_no_open_file_and_crosses_to_other_processes(tmp_path: Path) -> None:
    # case G5-14
    path = tmp_path / "a.h5"
    shard = sealed(path)
    assert_same_groups(pickle.loads(pickle.dumps(shard)).groups, ODD_GROUPS)
    for method in ("spawn", "fork"):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
            assert_same_groups(pool.submit(read_shard, path).result(60).groups, ODD_GROUPS)


def test_another_program_reads_a_shard_as_soon_as_it_is_sealed(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from towline.storage.ledger import read_shard
print("waiting", flush=True)
shard = read_shard(Path(sys.stdin.readline().strip()))
print(shard.digest, sum(len(c.token_ids) for g in shard.groups for c in g.completions))
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "waiting\n"
        digest = seal_shard(tmp_path / "a.h5", ODD_GROUPS, ORIGIN)
        answer, _ = reader.communicate(f"{tmp_path / 'a.h5'}\n", timeout=60)
    assert answer == f"{digest} 5\n"


STALLING_WRITER = """
import os, sys, time
from pathlib import Path
from towline.storage import ledger

original, final, moment = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
shard, link, write = ledger.read_shard(original), os.link, Path.write_bytes

def stall():
    print("here", flush=True)
    time.sleep(60)

def write_half(path, content):
    write(path, content[: len(content) // 2])
    stall()

def stall_before(source, target):
    stall()

def stall_after(source, target):
    link(source, target)
    stall()

if moment == "during the write":
    Path.write_bytes = write_half
else:
    os.link = stall_before if moment == "before publication" else stall_after
ledger.seal_shard(final, shard.groups, shard.origin)
"""


@pytest.mark.parametrize("moment", ["during the write", "before publication", "after publication"])
def test_a_writer_killed_at_any_moment_leaves_a_whole_shard_or_none(tmp_path: Path, moment: str) -> None:
    # cases G5-01, G5-05, G5-06
    rollouts = tmp_path / "rollouts"
    earlier = rollouts / f"{ChunkId(step=0, wave=0, chunk=0)}.h5"
    final = rollouts / f"{ChunkId(step=0, wave=0, chunk=1)}.h5"
    digest = seal_shard(earlier, ODD_GROUPS, ORIGIN)
    is_there = moment == "after publication"

    def check() -> None:
        assert read_shard(earlier).digest == digest
        assert sealed_chunks(rollouts, 0) == [earlier, final][: 1 + is_there]
        if is_there:
            assert read_shard(final).digest == digest
        else:
            with pytest.raises(LedgerError, match="is missing"):
                read_shard(final)

    command = [sys.executable, "-c", STALLING_WRITER, earlier, final, moment]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "here\n"
        check()
        writer.kill()
    check()
    assert len(list(final.parent.glob(".*.tmp"))) == 1
    if not is_there:
        assert seal_shard(final, ODD_GROUPS, ORIGIN) == digest
        assert sealed_chunks(rollouts, 0) == [earlier, final]


def test_a_file_still_written_in_place_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    # case G5-01: the default lock of HDF5 would answer with errno 11
    code = """
import h5py, sys
file = h5py.File(sys.argv[1], "w")
file["ids"] = range(100_000)
file.flush()
print("open", flush=True)
sys.stdin.read()
"""
    path = tmp_path / "a.h5"
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        with pytest.raises(LedgerError, match=re.escape(str(path))):
            read_shard(path)
        writer.communicate()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "256k") as is_mounted:
        if not is_mounted:
            pytest.skip("mounting a small file system is refused")
        yield tmp_path / "disk"


def large_groups() -> tuple[RolloutGroup, ...]:
    """Half a megabyte that does not compress."""
    return (group(0, completion(np.random.default_rng(0).integers(0, 2**31, 150_000).tolist())),)


def test_a_full_disk_publishes_nothing_and_the_process_lives_on(tiny_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        seal_shard(tiny_disk / "a.h5", large_groups(), ORIGIN)
    assert list(tiny_disk.iterdir()) == []
    assert_same_groups(sealed(tiny_disk / "b.h5").groups, ODD_GROUPS)


def test_a_limit_on_file_size_publishes_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    groups = large_groups()
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            seal_shard(tmp_path / "a.h5", groups, ORIGIN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    assert_same_groups(sealed(tmp_path / "a.h5", groups).groups, groups)


def test_every_field_of_a_score_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    ok, fails, times_out = ScoreStatus
    failed = Score(
        parts={"format": 1.0, "exact_match": NAN},
        part_status={"format": ok, "exact_match": fails},
        part_seconds={"format": 0.0625, "exact_match": 0.1875},
        total=NAN,
        status=fails,
        seconds=0.25,
        detail="π \ud800",
    )
    late = Score(
        parts={"format": NAN, "exact_match": NAN},
        part_status={"format": fails, "exact_match": times_out},
        part_seconds={"format": NAN, "exact_match": 5.0},
        total=NAN,
        status=times_out,
        seconds=5.0,
    )
    good = Score(
        parts={"format": 0.1, "exact_match": -1e-300},
        part_status={"format": ok, "exact_match": ok},
        part_seconds={"format": 0.0, "exact_match": 0.0},
        total=70000.1,
        status=ok,
        seconds=0.0,
    )
    seal_scores(path, sheet("d1", failed, late, good, format=0.3, exact_match=1.0))
    found = read_scores(path)
    # By text, in which NaN equals NaN.
    assert repr([score.parts["exact_match"] for score in found.scores]) == "[nan, nan, -1e-300]"
    assert repr([score.parts["format"] for score in found.scores]) == "[1.0, nan, 0.1]"
    assert [score.part_status["format"] for score in found.scores] == [ok, fails, ok]
    assert [score.part_status["exact_match"] for score in found.scores] == [fails, times_out, ok]
    assert repr([score.part_seconds["format"] for score in found.scores]) == "[0.0625, nan, 0.0]"
    assert [score.part_seconds["exact_match"] for score in found.scores] == [0.1875, 5.0, 0.0]
    assert repr([score.total for score in found.scores]) == "[nan, nan, 70000.1]"
    assert [score.status for score in found.scores] == [ScoreStatus.FAILED, ScoreStatus.TIMEOUT, ScoreStatus.OK]
    assert [score.seconds for score in found.scores] == [0.25, 5.0, 0.0]
    assert [score.detail for score in found.scores] == ["π \ud800", "", ""]
    assert found.weights == {"format": 0.3, "exact_match": 1.0}
    assert (found.code_hash, found.shard_digest, found.began, found.ended) == ("f00", "d1", 2.25, 3.1)


def test_a_later_scoring_lies_beside_the_first_and_is_no_chunk(tmp_path: Path) -> None:
    path = tmp_path / "step-000000" / "wave-0" / "chunk-000.h5"
    seal_shard(path, (), ORIGIN)
    seal_scores(path, sheet("d", score(1.0, format=1.0), format=1.0))
    first = scores_path(path).read_bytes()
    seal_scores(path, sheet("d", score(0.0, format=0.0), format=1.0), again="f00")
    with pytest.raises(FileExistsError):
        seal_scores(path, sheet("d", score(0.5, format=0.5), format=1.0), again="f00")
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "chunk-000.h5", "chunk-000.scores-f00.h5", "chunk-000.scores.h5",
    ]  # fmt: skip
    assert read_scores(path, again="f00").scores[0].total == 0.0
    assert scores_path(path).read_bytes() == first
    assert sealed_chunks(tmp_path, 0) == [path]
    assert orphans(tmp_path) == []


def test_each_part_keeps_its_own_value_in_whatever_order_parts_are_named(tmp_path: Path) -> None:
    scores = (score(9.0, zeta=1.0, alpha=2.0, mid=3.0), score(9.0, mid=6.0, zeta=4.0, alpha=5.0))
    seal_scores(tmp_path / "a.h5", sheet("d", *scores, mid=0.0, zeta=-1.0, alpha=0.5))
    found = read_scores(tmp_path / "a.h5")
    assert found.scores[0].parts == {"alpha": 2.0, "mid": 3.0, "zeta": 1.0}
    assert found.scores[1].parts == {"alpha": 5.0, "mid": 6.0, "zeta": 4.0}
    assert found.scores[1].part_seconds == {"alpha": 0.25, "mid": 0.25, "zeta": 0.25}
    assert found.weights == {"alpha": 0.5, "mid": 0.0, "zeta": -1.0}


def test_scores_of_no_completions_come_back(tmp_path: Path) -> None:
    seal_scores(tmp_path / "a.h5", sheet("d", format=1.0, exact_match=1.0))
    assert read_scores(tmp_path / "a.h5").scores == ()


@pytest.mark.parametrize("parts", [{"format": 1.0}, {"format": 1.0, "exact_match": 1.0, "bonus": 1.0}])
def test_a_score_whose_parts_are_not_the_sheet_s_is_refused(tmp_path: Path, parts: dict[str, float]) -> None:
    with pytest.raises(LedgerError, match=r"a\.scores\.h5: a score has the parts .*expected \['exact_match', 'format'"):
        seal_scores(tmp_path / "a.h5", sheet("d", score(1.0, **parts), format=1.0, exact_match=1.0))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("field", ["part_status", "part_seconds"])
def test_a_score_that_says_nothing_of_one_of_its_parts_is_refused(tmp_path: Path, field: str) -> None:
    odd = dataclasses.replace(score(1.0), **{field: {}})
    with pytest.raises(LedgerError, match=r"a score has the parts \[\], expected \['exact_match'\]"):
        seal_scores(tmp_path / "a.h5", sheet("d", odd))


def test_scores_of_the_first_version_are_read_without_the_time_of_each_part(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    columns = {
        "parts": np.array([1.0, NAN, 0.5, 1.0]),
        "total": np.array([NAN, 1.5]),
        "status": np.array([1, 0]),
        "seconds": np.array([0.25, 0.5]),
        "detail": np.zeros(0),
        "detail_offsets": np.zeros(3),
    }
    first = tuple(column for column in SCORES if column.since == 1)
    attributes = {"weights": {"b": 1.0, "a": 1.0}, "code_hash": "f00", "shard_digest": "d", "began": 0.0, "ended": 1.0}
    write_columns(scores_path(path), "scores", first, columns, attributes)
    with h5py.File(scores_path(path), "r+") as file:
        file.attrs["schema_version"] = 1
    failed, good = read_scores(path).scores
    assert repr(failed.parts) == "{'a': 1.0, 'b': nan}"
    assert failed.part_status == {"a": ScoreStatus.OK, "b": ScoreStatus.FAILED}
    assert good.part_status == {"a": ScoreStatus.OK, "b": ScoreStatus.OK}
    assert repr(good.part_seconds) == "{'a': nan, 'b': nan}"
    assert (failed.seconds, good.total) == (0.25, 1.5)


def test_scores_are_sealed_once(tmp_path: Path) -> None:
    seal_scores(tmp_path / "a.h5", sheet("d", score(1.0)))
    with pytest.raises(FileExistsError):
        seal_scores(tmp_path / "a.h5", sheet("d", score(0.0)))
    assert read_scores(tmp_path / "a.h5").scores[0].total == 1.0


def test_a_shard_and_its_scores_are_read_together(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    shard = sealed(path)
    seal_scores(path, sheet(shard.digest, score(0.0), score(1.0), score(2.0)))
    found, scores = read_scored_shard(path)
    assert found.digest == shard.digest
    assert [score.total for score in scores.scores] == [0.0, 1.0, 2.0]


def test_scores_of_another_shard_are_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "a.h5", tmp_path / "b.h5"
    sealed(path)
    digest = sealed(other, (*ODD_GROUPS, group(9))).digest
    seal_scores(path, sheet(digest, score(0.0), score(1.0), score(2.0)))
    with pytest.raises(LedgerError, match=r"a\.scores\.h5 was made for another shard than a\.h5"):
        read_scored_shard(path)


def test_a_shard_replaced_after_it_was_scored_is_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "a.h5", tmp_path / "b.h5"
    seal_scores(path, sheet(sealed(path).digest, score(0.0), score(1.0), score(2.0)))
    sealed(other, (*ODD_GROUPS, group(9)))
    other.replace(path)
    with pytest.raises(LedgerError, match="was made for another shard"):
        read_scored_shard(path)


def test_scores_of_too_few_completions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    seal_scores(path, sheet(sealed(path).digest, score(0.0), score(1.0)))
    with pytest.raises(LedgerError, match="was made for another shard"):
        read_scored_shard(path)


def test_a_shard_without_scores_is_refused_by_the_name_of_the_missing_file(tmp_path: Path) -> None:
    sealed(tmp_path / "a.h5")
    with pytest.raises(LedgerError, match=r"a\.scores\.h5 is missing"):
        read_scored_shard(tmp_path / "a.h5")


def test_scores_and_shards_are_not_taken_for_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    seal_scores(path, sheet(sealed(path).digest, score(0.0), score(1.0), score(2.0)))
    with pytest.raises(LedgerError, match="found kind and version"):
        read_shard(scores_path(path))
    shutil.copy(path, scores_path(tmp_path / "b.h5"))
    with pytest.raises(LedgerError, match="found kind and version"):
        read_scores(tmp_path / "b.h5")


def test_shards_are_listed_in_canonical_order(tmp_path: Path) -> None:
    places = [(0, 2), (0, 10), (0, 999), (0, 1000), (2, 0), (10, 0)]
    paths = [tmp_path / f"{ChunkId(step=5, wave=wave, chunk=chunk)}.h5" for wave, chunk in places]
    for number in (3, 5, 0, 4, 2, 1):
        paths[number].parent.mkdir(parents=True, exist_ok=True)
        paths[number].touch()
    assert sealed_chunks(tmp_path, 5) == paths
    assert sealed_chunks(tmp_path, 6) == []


def test_leftovers_scores_and_foreign_files_are_not_listed(tmp_path: Path) -> None:
    folder = tmp_path / "step-000000/wave-0"
    folder.mkdir(parents=True)
    foreign = ["chunk-000.scores.h5", ".chunk-000.h5.12.0a1b2c3d.tmp", "chunk-abc.h5", "chunk-0.h5", "chunk-000.h5.bak"]
    for name in foreign:
        (folder / name).touch()
    assert sealed_chunks(tmp_path, 0) == []
    (folder / "chunk-000.h5").touch()
    assert sealed_chunks(tmp_path, 0) == [folder / "chunk-000.h5"]


def test_steps_with_a_shard_are_listed_in_order(tmp_path: Path) -> None:
    for step in (12, 2, 1_000_000, 999_999):
        path = tmp_path / f"{ChunkId(step=step, wave=0, chunk=0)}.h5"
        path.parent.mkdir(parents=True)
        path.touch()
    (tmp_path / "step-000004/wave-0").mkdir(parents=True)
    (tmp_path / "step-latest").mkdir()
    assert sealed_steps(tmp_path) == [2, 12, 999_999, 1_000_000]
    assert sealed_steps(tmp_path / "absent") == []
