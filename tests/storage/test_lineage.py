"""Branches of versions: when one begins, what it shares, and which rollouts may be read on it.

Three branches, as drawn in the module:

    version    0  1  2  3  4  5  6  7
    branch 0   o  a1 a2 a3 a4 a5
    branch 1            b3 b4 b5 b6
    branch 2                  c5 c6 c7
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from towline.storage.errors import LedgerError
from towline.storage.lineage import Lineage, fits, is_off_policy
from towline.storage.records import ChunkId, ShardOrigin
from towline.storage.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


@pytest.fixture
def three(run: RunDirectory) -> Lineage:
    lineage = Lineage.open(run, attempt=0)
    assert not any([lineage.settle(version, f"a{version}") for version in range(1, 6)])
    assert [lineage.settle(version, f"b{version}") for version in range(3, 7)] == [True, False, False, False]
    assert [lineage.settle(version, f"c{version}") for version in range(5, 8)] == [True, False, False]
    return lineage


def origin(step: int, hashes: dict[int, str], *, branch: int = 0, sampling_hash: str = "") -> ShardOrigin:
    return ShardOrigin(
        chunk=ChunkId(step=step, wave=0, chunk=0),
        branch=branch,
        engine=0,
        attempt=0,
        weight_hashes=hashes,
        sampling={},
        began=0.0,
        ended=1.0,
        sampling_hash=sampling_hash,
    )


def reason(lineage: Lineage, shard: ShardOrigin, *, max_staleness: int, sampling_hash: str = "") -> str | None:
    return fits(lineage, shard, sampling_hash=sampling_hash, max_staleness=max_staleness)


def test_a_new_run_is_on_branch_0_and_nothing_is_written_by_looking(run: RunDirectory) -> None:
    lineage = Lineage.open(run, attempt=0)
    assert (lineage.branch, lineage.digest(0), lineage.forks) == (0, None, ())
    assert list(run.root.iterdir()) == []


def test_each_version_and_each_fork_is_one_line(run: RunDirectory, three: Lineage) -> None:
    lines = [json.loads(line) for line in run.lineage.read_text().splitlines()]
    assert lines[0] == {"branch": 0, "version": 1, "digest": "a1", "attempt": 0}
    assert lines[5:7] == [
        {"branch": 1, "parent": 0, "fork": 3, "attempt": 0},
        {"branch": 1, "version": 3, "digest": "b3", "attempt": 0},
    ]
    assert lines[10] == {"branch": 2, "parent": 1, "fork": 5, "attempt": 0}
    assert len(lines) == 5 + 5 + 4


def test_a_branch_has_its_ancestors_versions_below_its_fork(three: Lineage) -> None:
    assert three.branch == 2
    assert [three.digest(version) for version in range(9)] == [
        None, "a1", "a2", "b3", "b4", "c5", "c6", "c7", None,
    ]  # fmt: skip
    three.continue_from(1)
    assert [three.digest(version) for version in range(2, 8)] == ["a2", "b3", "b4", "b5", "b6", None]
    three.continue_from(0)
    assert [three.digest(version) for version in range(2, 7)] == ["a2", "a3", "a4", "a5", None]


def test_what_was_written_is_read_again(run: RunDirectory, three: Lineage) -> None:
    again = Lineage.open(run, attempt=1)
    assert (again.branch, again.forks) == (2, three.forks)
    assert [again.digest(version) for version in range(9)] == [three.digest(version) for version in range(9)]
    assert [again.versions(branch) for branch in range(3)] == [[1, 2, 3, 4, 5], [3, 4, 5, 6], [5, 6, 7]]


def test_the_same_weights_again_keep_the_branch_and_write_nothing(run: RunDirectory, three: Lineage) -> None:
    before = run.lineage.read_bytes()
    again = Lineage.open(run, attempt=1)
    assert not any([again.settle(version, digest) for version, digest in ((2, "a2"), (4, "b4"), (7, "c7"))])
    assert again.branch == 2
    assert run.lineage.read_bytes() == before


def test_other_weights_below_a_fork_begin_a_branch_of_the_branch_that_owns_them(three: Lineage) -> None:
    assert three.settle(2, "d2")
    fork = three.forks[-1]
    assert (fork.branch, fork.parent, fork.fork) == (3, 0, 2)
    assert [three.digest(version) for version in range(1, 5)] == ["a1", "d2", None, None]


def test_other_weights_at_a_fork_begin_a_sister(three: Lineage) -> None:
    # Version 4, the last that both share, is branch 1's.
    assert three.settle(5, "d5")
    assert (three.forks[-1].parent, three.forks[-1].fork) == (1, 5)


def test_a_version_below_the_fork_that_was_not_recorded_is_its_owner_s(run: RunDirectory) -> None:
    lineage = Lineage.open(run, attempt=0)
    lineage.settle(1, "a1")
    lineage.open_branch(4)
    assert not lineage.settle(3, "a3")
    assert json.loads(run.lineage.read_text().splitlines()[-1])["branch"] == 0
    assert (lineage.branch, lineage.digest(3)) == (1, "a3")
    assert Lineage.open(run, attempt=1).branch == 1


def test_a_roll_back_always_opens_a_branch(run: RunDirectory, three: Lineage) -> None:
    assert three.open_branch(4) == 3
    assert three.open_branch(4) == 4
    assert (three.branch, three.forks[-2].parent, three.forks[-1].parent) == (4, 1, 1)
    assert not three.settle(4, "b4")  # by chance the same weights; its own branch all the same
    assert three.versions(4) == [4]
    assert Lineage.open(run, attempt=1).branch == 4


def test_a_resume_goes_on_where_its_checkpoint_was(run: RunDirectory, three: Lineage) -> None:
    again = Lineage.open(run, attempt=1)
    again.continue_from(0)
    assert not again.settle(5, "a5")
    assert not again.settle(6, "a6")
    assert Lineage.open(run, attempt=2).branch == 0
    assert again.settle(6, "d6")
    assert (again.branch, again.forks[-1].parent) == (3, 0)


def test_a_branch_that_is_not_recorded_is_refused(three: Lineage) -> None:
    with pytest.raises(LedgerError, match=r"branch 7 is not in .*lineage\.jsonl, which has \[0, 1, 2\]"):
        three.continue_from(7)
    with pytest.raises(LedgerError, match="branch 7 is not in"):
        three.fork_distance(7, 9)


@pytest.mark.parametrize(
    ("current", "other", "step", "distance"),
    [
        (2, 2, 9, 0),
        (2, 1, 9, 9 - 4),
        (2, 0, 9, 9 - 2),
        (0, 2, 9, 9 - 2),
        (1, 2, 5, 5 - 4),
        (1, 0, 3, 3 - 2),
        (1, 0, 2, 0),
        (1, 0, 1, 0),
    ],
)
def test_the_distance_counts_from_the_last_version_that_both_share(
    three: Lineage, current: int, other: int, step: int, distance: int
) -> None:
    three.continue_from(current)
    assert three.fork_distance(other, step) == distance


def test_two_branches_of_a_third_share_what_both_took_from_it(three: Lineage) -> None:
    three.continue_from(1)
    assert three.settle(6, "d6")
    # Branch 2 leaves branch 1 at 5, branch 3 at 6: the last that they share is 4.
    assert (three.branch, three.fork_distance(2, 6), three.fork_distance(1, 6)) == (3, 2, 1)


@pytest.mark.parametrize(
    "torn", [b'{"branch": 2, "vers', b"{", b"\0\0\0\0", b'{"branch": 2, "version": 9, "digest": "c9"']
)
def test_a_last_line_that_a_killed_writer_left_is_ignored_and_overwritten(
    run: RunDirectory, three: Lineage, torn: bytes
) -> None:
    whole = run.lineage.read_bytes()
    run.lineage.write_bytes(whole + torn)
    again = Lineage.open(run, attempt=1)
    assert (again.branch, again.digest(7), again.digest(9)) == (2, "c7", None)
    assert run.lineage.read_bytes() == whole + torn
    again.settle(8, "c8")
    assert run.lineage.read_bytes() == whole + b'{"branch": 2, "version": 8, "digest": "c8", "attempt": 1}\n'
    assert Lineage.open(run, attempt=2).digest(8) == "c8"


def test_every_prefix_of_the_file_can_be_read(run: RunDirectory, three: Lineage) -> None:
    whole = run.lineage.read_bytes()
    for length in range(len(whole) + 1):
        run.lineage.write_bytes(whole[:length])
        assert sum(len(Lineage.open(run, 1).versions(branch)) for branch in range(3)) <= 12


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b'{"branch": 2, "vers', "Invalid JSON"),
        (b"", "Invalid JSON"),
        (b'{"branch": 0, "version": 1, "digest": "a1"}', "Field required"),
        (b'{"branch": 0, "version": "1", "digest": "a1", "attempt": 0}', "valid integer"),
        (b'{"branch": 0, "version": -1, "digest": "a1", "attempt": 0}', "greater than or equal to 0"),
        (b'{"branch": 9, "version": 1, "digest": "a1", "attempt": 0}', "branch 9 is not known"),
        (
            b'{"branch": 0, "version": 1, "digest": "zz", "attempt": 0}',
            "version 1 of branch 0 is recorded with another",
        ),
        (b'{"branch": 1, "parent": 0, "fork": 2, "attempt": 0}', "branch 1 begins twice"),
        (b'{"branch": 0, "parent": 0, "fork": 2, "attempt": 0}', "branch 0 begins twice"),
        (b'{"branch": 3, "parent": 3, "fork": 2, "attempt": 0}', "parent 3 is not known"),
        (b"\xff\xfe", "Invalid JSON"),
    ],
)
def test_any_other_bad_line_is_an_error_that_names_it(
    run: RunDirectory, three: Lineage, line: bytes, found: str
) -> None:
    run.lineage.write_bytes(run.lineage.read_bytes() + line + b"\n")
    with pytest.raises(LedgerError, match=rf"lineage\.jsonl:15: .*({found})"):
        Lineage.open(run, attempt=1)


def test_a_line_is_on_the_disk_before_anybody_acts_on_it(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    lineage = Lineage.open(run, attempt=0)
    synced: list[bytes] = []
    fsync = os.fsync

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(run.lineage.read_bytes())

    monkeypatch.setattr(os, "fsync", noted_fsync)
    lineage.settle(1, "a1")
    assert synced[0] == b'{"branch": 0, "version": 1, "digest": "a1", "attempt": 0}\n'
    assert len(synced) == 2  # and the folder, which has a new name

    def full(descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        lineage.settle(1, "b1")
    assert (lineage.branch, lineage.digest(1)) == (0, "a1")


KILLED_WRITER = """
import os, sys
from pathlib import Path
from towline.storage.lineage import Lineage
from towline.storage.run_directory import RunDirectory
lineage = Lineage.open(RunDirectory(Path(sys.argv[1])), attempt=0)
for version in range(1, 100):
    lineage.settle(version, f"a{version}")
    print(version, flush=True)
"""


def test_a_writer_killed_while_it_writes_loses_nothing_that_it_told_of(run: RunDirectory) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_WRITER, str(run.root)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        for _ in range(20):
            writer.stdout.readline()
        writer.kill()
        told = 20 + len(writer.stdout.readlines())
    lineage = Lineage.open(run, attempt=1)
    assert [lineage.digest(version) for version in range(1, told + 1)] == [
        f"a{number}" for number in range(1, told + 1)
    ]


def test_a_shard_of_the_same_weights_fits_on_whatever_branch_it_was_made(three: Lineage) -> None:
    assert reason(three, origin(4, {4: "b4"}, branch=1), max_staleness=0) is None
    assert reason(three, origin(2, {1: "a1", 2: "a2"}, branch=0), max_staleness=0) is None
    assert reason(three, origin(7, {7: "c7"}, branch=1), max_staleness=0) is None
    assert not is_off_policy(three, origin(7, {7: "c7"}, branch=1))


def test_a_shard_of_other_weights_fits_within_max_staleness_and_is_off_policy(three: Lineage) -> None:
    near, far = origin(5, {5: "b5"}, branch=1), origin(6, {5: "b5", 6: "b6"}, branch=1)
    # The last version that branches 1 and 2 share is 4.
    assert reason(three, near, max_staleness=1) is None
    assert reason(three, far, max_staleness=2) is None
    assert is_off_policy(three, near)
    assert is_off_policy(three, far)
    assert "step 5 is 1 past the last that they share, max_staleness is 0" in str(reason(three, near, max_staleness=0))
    assert reason(three, far, max_staleness=1) == (
        "version 5 of branch 1 has other weights than that of branch 2; "
        "step 6 is 2 past the last that they share, max_staleness is 1"
    )


def test_the_distance_is_that_of_the_fork_whichever_version_wrote(three: Lineage) -> None:
    assert reason(three, origin(6, {6: "b6"}, branch=1), max_staleness=1) is not None
    assert reason(three, origin(5, {3: "a3"}, branch=0), max_staleness=2) is not None
    assert reason(three, origin(5, {3: "a3"}, branch=0), max_staleness=3) is None


def test_weights_loaded_from_disk_are_not_compared(three: Lineage) -> None:
    assert reason(three, origin(6, {5: "", 6: ""}, branch=1), max_staleness=0) is None
    assert not is_off_policy(three, origin(6, {6: ""}, branch=1))


def test_versions_that_are_not_recorded_yet_cannot_conflict_on_their_own_line(three: Lineage) -> None:
    three.continue_from(1)
    ahead = origin(8, {7: "b7", 8: "b8"}, branch=1)
    assert reason(three, ahead, max_staleness=0) is None
    assert not is_off_policy(three, ahead)


def test_a_shard_of_a_branch_left_behind_does_not_fit_before_the_new_one_has_come_so_far(run: RunDirectory) -> None:
    lineage = Lineage.open(run, attempt=0)
    for version in range(1, 5):
        lineage.settle(version, f"a{version}")
    assert lineage.settle(2, "b2")
    shard = origin(4, {3: "a3", 4: "a4"}, branch=0)
    assert "step 4 is 3 past" in str(reason(lineage, shard, max_staleness=1))
    assert is_off_policy(lineage, shard)
    assert reason(lineage, shard, max_staleness=3) is None


def test_weights_that_nobody_recorded_before_the_trainer_died_differ_on_one_branch(run: RunDirectory) -> None:
    lineage = Lineage.open(run, attempt=1)
    lineage.settle(1, "a1")
    lineage.settle(2, "a2")
    shard = origin(3, {2: "lost"})
    assert "step 3 is 2 past" in str(reason(lineage, shard, max_staleness=1))
    assert reason(lineage, shard, max_staleness=2) is None
    assert is_off_policy(lineage, shard)


def test_a_shard_of_other_sampling_settings_or_data_does_not_fit(three: Lineage) -> None:
    shard = origin(4, {4: "b4"}, branch=1, sampling_hash="0123456789abcdef")
    assert reason(three, shard, max_staleness=9, sampling_hash="ff") == (
        "sampled with other settings or data: hash 0123456789ab…, expected ff"
    )
    assert reason(three, shard, max_staleness=0, sampling_hash="0123456789abcdef") is None
    assert reason(three, shard, max_staleness=0) is None
    assert reason(three, origin(4, {4: "b4"}, branch=1), max_staleness=0, sampling_hash="ff") is None


def test_a_shard_of_a_branch_that_is_not_recorded_does_not_fit(three: Lineage) -> None:
    shard = origin(4, {4: "b4"}, branch=7)
    assert reason(three, shard, max_staleness=9) == "its branch 7 is not in the lineage, which ends with branch 2"
    assert is_off_policy(three, shard)
