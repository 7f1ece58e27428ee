"""The HDF5 layout of the ledger, in one table.

A shard holds the rollouts of one chunk: flat arrays with offsets, so that a thousand completions cost a handful of
datasets. A score file lies beside its shard and holds the rewards; those of later scorings lie beside the first as
chunk-000.scores-NAME.h5 and are not trained on. G = groups, C = completions, P = prompt tokens, T = completion
tokens, R = reward parts, B = bytes of UTF-8 text.

Measured (2,048 rollouts, 23 MB): shuffle + zstd level 3 in 16 k chunks writes 377 MB/s and shrinks 2.6 times.
"""

from dataclasses import dataclass

VERSIONS = {"rollouts": 1, "scores": 3, "reference": 1}
"""Kind of file → version that is written. Older ones are read; they lack what came since."""
CHUNK_ELEMENTS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    name: str
    dtype: str
    length: str
    meaning: str
    since: int = 1
    """First version of its kind of file that has it."""


SHARD = (
    Column(name="prompt/row", dtype="int64", length="G", meaning="row of the dataset, from 0"),
    Column(name="prompt/token_ids", dtype="int32", length="P", meaning="as given to the engine"),
    Column(name="prompt/token_offsets", dtype="int64", length="G+1", meaning="group g is [offsets[g], offsets[g+1])"),
    Column(name="prompt/text", dtype="uint8", length="B", meaning="after the template, UTF-8"),
    Column(name="prompt/text_offsets", dtype="int64", length="G+1", meaning="bytes"),
    Column(name="prompt/answer", dtype="uint8", length="B", meaning="the gold answer, UTF-8"),
    Column(name="prompt/answer_offsets", dtype="int64", length="G+1", meaning="bytes"),
    Column(name="completion/group", dtype="int32", length="C", meaning="index of the group, ascending"),
    Column(name="completion/token_ids", dtype="int32", length="T", meaning="as sampled, end-of-turn included"),
    Column(name="completion/logprobs", dtype="float32", length="T", meaning="natural log, at sampling temperature"),
    Column(name="completion/versions", dtype="uint32", length="T", meaning="policy version of each token"),
    Column(name="completion/token_offsets", dtype="int64", length="C+1", meaning="completion c is [c], [c+1]"),
    Column(name="completion/finish_reason", dtype="uint8", length="C", meaning="0 stop, 1 length, 2 aborted"),
    Column(name="completion/seed", dtype="int64", length="C", meaning="sampling seed of the request"),
    Column(name="completion/text", dtype="uint8", length="B", meaning="decoded without special tokens, UTF-8"),
    Column(name="completion/text_offsets", dtype="int64", length="C+1", meaning="bytes"),
)
"""Attributes of a shard: schema_version, kind = "rollouts", header (JSON: origin: chunk, branch, engine, attempt,
weight_hashes, sampling, began, ended, sampling_hash), digest (blake2b over every column)."""

SCORES = (
    Column(
        name="parts", dtype="float64", length="C*R", meaning="row-major [C, R], parts by name ascending; NaN = failed"
    ),
    Column(name="part_status", dtype="uint8", length="C*R", meaning="[C, R]: 0 ok, 1 failed, 2 time-out", since=2),
    Column(
        name="part_seconds", dtype="float32", length="C*R", meaning="[C, R]: wall time; NaN = not measured", since=2
    ),
    Column(name="total", dtype="float64", length="C", meaning="without length; NaN unless every part is OK"),
    Column(name="status", dtype="uint8", length="C", meaning="the worst of the parts'"),
    Column(name="seconds", dtype="float32", length="C", meaning="wall time of all parts together"),
    Column(name="detail", dtype="uint8", length="B", meaning="why it failed, UTF-8"),
    Column(name="detail_offsets", dtype="int64", length="C+1", meaning="bytes"),
)
"""Attributes of a score file: schema_version, kind = "scores",
header (JSON: weights by part name, code_hash, shard_digest of the shard that was scored, began, ended, and since
version 3 isolation: what shut in the programs that a reward ran), digest."""

REFERENCE = (
    Column(name="chosen", dtype="float64", length="E", meaning="log-prob of the whole completion, nats"),
    Column(name="rejected", dtype="float64", length="E", meaning="the same of the other completion"),
)
"""What a reference says of pairs, E = pairs. Attributes of the file: schema_version, kind = "reference", header (JSON:
model, data, precision, see `reference_table`), digest."""
