"""A small project on disk (model folder, data, experiment file) and a run folder as a run would leave it."""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from fake_slurm import FakeSlurm
from towline.jobs.experiment import ExperimentConfig
from towline.jobs.load_experiment import recorded_experiment
from towline.jobs.slurm.profile import ClusterProfile, Group
from towline.launcher.experiment_file import ExperimentFile, read_experiment
from towline.launcher.findings import Findings
from towline.launcher.preflight import preflight
from towline.launcher.run import make_run
from towline.launcher.tokenized_prompts import NUM_RENDERED, Tokenized
from towline.storage.checkpoints import TrainingState, checkpoint_path, mark_complete
from towline.storage.ledger import ScoreSheet, seal_scores, seal_shard
from towline.storage.metrics import append_jsonl
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
from towline.storage.run_directory import RunDirectory, write_json

WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz0123456789"]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "vocab_size": len(WORDS),
    "dtype": "float32",
}
SMALL_GROUP = Group(sbatch={"time": "00:30:00"})
EXPERIMENT = """\
objective = "grpo"
steps = 3

[policy]
model = "model"

[data]
train = "train.jsonl"
chat = false

[rollout]
prompts_per_step = 2
group_size = 2
max_completion_tokens = 4

[[rewards]]
use = "exact_match"
weight = 1.0

[trainer]
learning_rate = 1e-4

[evaluation.data]
train = "held_out.jsonl"
chat = false

[run]
root = "runs"
"""


@dataclass(frozen=True)
class Project:
    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "small.toml"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def change(self, old: str, new: str) -> None:
        """Replace a piece of the experiment file that is there exactly once."""
        text = self.file.read_text()
        assert text.count(old) == 1
        self.file.write_text(text.replace(old, new))

    def write_rows(self, name: str, prompts: Sequence[str]) -> None:
        rows = [json.dumps({"prompt": prompt, "answer": prompt}) + "\n" for prompt in prompts]
        (self.folder / name).write_text("".join(rows))

    def learn_from_pairs(self, objective: str) -> None:
        """Make it an experiment of five pairs, of which the seed 0 puts two into the first half, and three held out."""
        for name, prompts in (("train", "acbgi"), ("held_out", "xyz")):
            rows = [json.dumps({"prompt": prompt, "chosen": "b", "rejected": "c"}) + "\n" for prompt in prompts]
            (self.folder / f"{name}.jsonl").write_text("".join(rows))
        before, _, after = self.file.read_text().partition("[rollout]")
        after = after.partition("[trainer]\n")[2]
        text = f"{before}[trainer]\nbatch_size = 1\n{after}".replace('"grpo"', f'"{objective}"')
        self.file.write_text(text)

    def change_config(self, **values: object) -> None:
        (self.model / "config.json").write_text(json.dumps(CONFIG | values))

    def read(self, *overrides: str) -> tuple[ExperimentFile, ExperimentConfig]:
        return read_experiment(self.file, overrides)

    def look(self, *overrides: str) -> Findings:
        """Preflight with a tokenizer of words, which needs no time to start."""
        return preflight(*self.read(*overrides), tokenizer=count_words)


def count_words(model: Path, datasets: Sequence[tuple[Sequence[str], bool]]) -> list[Tokenized]:
    return [
        Tokenized(counts=[len(text.split()) for text in texts], rendered=list(texts[:NUM_RENDERED]))
        for texts, _ in datasets
    ]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path / "project")
    write_model(project.model)
    project.file.write_text(EXPERIMENT)
    project.write_rows("train.jsonl", ["a b", "c d", "e f"])
    project.write_rows("held_out.jsonl", ["x y", "z"])
    return project


def write_model(folder: Path) -> None:
    """A few kilobytes: one token a word, and no chat template."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(word_tokenizer()))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    write_safetensors(folder / "model.safetensors", {"embed.weight": [len(WORDS), 8], "norm.weight": [8]})


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    """Float32 zeros: 8 bytes of length, the header as JSON, the data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def word_tokenizer() -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": WORDS[number], **flags} for number in range(3)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: id for id, word in enumerate(WORDS)}, "unk_token": "<unk>"},
    }


@pytest.fixture
def run(project: Project) -> RunDirectory:
    """A finished run of three steps; the last grading of step 2 failed, and evaluations went from 0 to 1 of 2."""
    run = make_run(*project.read("run.name=small-1"))
    for step in range(3):
        failed = step == 2
        seal(run.rollouts, step, group_size=2, totals=[0.0, 1.0, 1.0, float("nan") if failed else 1.0])
        append_jsonl(run.metrics, metrics_row(step))
    for version, totals in ((0, [0.0, 0.0]), (3, [0.0, 1.0])):
        seal(run.held_out, version, group_size=1, totals=totals)
        right = sum(totals)
        row = {"version": version, "accuracy": right / 2, "low": 0.0, "high": 0.9, "num_prompts": 2, "num_failed": 0}
        append_jsonl(run.evaluations, row | {"seconds": 1.0})
    keep_checkpoint(run, 3)
    run.logs(0).mkdir(parents=True)
    run.write_state(status="done", attempt=0, pid=os.getpid(), host=os.uname().nodename, started=100.0, ended=190.0,
                    fault=None, next_step=3)  # fmt: skip
    return run


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm.install(tmp_path / "bin", monkeypatch)


@pytest.fixture
def cluster_run(run: RunDirectory) -> RunDirectory:
    """The run as job 12 left it: two components, one attempt, which brought it to its end."""
    nodes = {"trainer": 2, "rollout": 2, "scorer": 0}
    experiment = recorded_experiment(run.config.read_text())
    write_json(run.config, experiment.model_dump(mode="json") | {"nodes": nodes})
    profile = ClusterProfile(name="small", trainer=SMALL_GROUP, rollout=SMALL_GROUP)
    write_json(run.cluster, profile.dump())
    run.slurm.mkdir()
    add_job(run, "12")
    begin = {"number": 0, "job": "12", "submission": 0, "nodes": ["t0", "t1", "r0", "r1"], "began": 100.0}
    append_jsonl(run.attempts_file, begin)
    append_jsonl(run.attempts_file, {"number": 0, "ended": 190.0, "outcome": "done"})
    return run


def add_job(run: RunDirectory, job: str, submission: int = 0) -> None:
    components = {"trainer": f"{job}+0", "rollout": f"{job}+1"}
    append_jsonl(run.submissions, {"job": job, "submission": submission, "submitted": time.time(),
                                   "components": components, "smoke": False})  # fmt: skip


def keep_checkpoint(run: RunDirectory, step: int) -> None:
    """A whole one, without weights."""
    state = TrainingState(step=step, wave=0, branch=0, version=step, stream_digest="", seed=0, data="", reference="",
                          kl_beta=0.04, ranks=1, zero_stage=2, precision="float32", optimizer={})  # fmt: skip
    checkpoint_path(run.checkpoints, step).mkdir(parents=True)
    mark_complete(run.checkpoints, step, state, {})


def metrics_row(step: int) -> dict[str, float]:
    return {
        "step": step,
        "version": step + 1,
        "reward/mean": 0.25 * step,
        "reward/failed": 0.25 if step == 2 else 0.0,
        "completion/length": 3.0 + step,
        "loss/policy": 0.5 - 0.1 * step,
        "loss/kl": 0.01 * step,
        "mismatch/k3": 3e-4,
        "staleness/max": 0,
        "speed/tokens_per_s": 1234.0,
        "seconds/step": 10.0,
        "seconds/wait": 4.0,
        "seconds/generate": 3.0,
        "seconds/score": 0.5,
        "seconds/train": 5.0,
        "seconds/sync": 1.0,
    }


def seal(folder: Path, step: int, *, group_size: int, totals: Sequence[float]) -> Path:
    """One scored chunk of `len(totals)` completions, each of two tokens."""
    chunk = ChunkId(step=step, wave=0, chunk=0)
    path = folder / f"{chunk}.h5"
    texts = [f"completion {number} of step {step}\x1b[31m" for number in range(len(totals))]
    completions = [completion(text, step) for text in texts]
    groups = tuple(
        RolloutGroup(
            prompt=Prompt(row=row, text=f"prompt {row}\nsecond line", answer=f"answer {row}"),
            prompt_token_ids=np.array([3, 4, 5]),
            completions=tuple(completions[row * group_size : (row + 1) * group_size]),
        )
        for row in range(len(totals) // group_size)
    )
    origin = ShardOrigin(
        chunk=chunk, branch=0, engine=0, attempt=0, weight_hashes={step: ""}, sampling={}, began=1.0, ended=2.0
    )
    digest = seal_shard(path, groups, origin)
    scores = tuple(score(total) for total in totals)
    sheet = ScoreSheet(
        scores=scores, weights={"exact_match": 1.0}, code_hash="0", shard_digest=digest, began=2.0, ended=3.0
    )
    seal_scores(path, sheet)
    return path


def completion(text: str, version: int) -> Completion:
    return Completion(
        token_ids=np.array([7, 1]),
        logprobs=np.array([-0.25, -0.75]),
        versions=np.array([version, version]),
        finish_reason=FinishReason.STOP,
        seed=0,
        text=text,
    )


def score(total: float) -> Score:
    failed = np.isnan(total)
    status = ScoreStatus.FAILED if failed else ScoreStatus.OK
    return Score(
        parts={"exact_match": total},
        part_status={"exact_match": status},
        part_seconds={"exact_match": 0.1},
        total=total,
        status=status,
        seconds=0.1,
        detail="exact_match: ZeroDivisionError at reward.py:3" if failed else "",
    )


@pytest.fixture(name="write_safetensors")
def _write_safetensors() -> Callable[[Path, dict[str, list[int]]], None]:
    return write_safetensors


@pytest.fixture(name="metrics_row")
def _metrics_row() -> Callable[[int], dict[str, float]]:
    return metrics_row


@pytest.fixture(autouse=True)
def _processor_with_bfloat16(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is warned of must not depend on the machine that the tests run on."""
    cpuinfo = tmp_path_factory.mktemp("processor") / "cpuinfo"
    cpuinfo.write_text("flags : avx512_bf16\n")
    monkeypatch.setattr("towline.launcher.processor.CPUINFO", cpuinfo)


@pytest.fixture(autouse=True)
def _not_a_login_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor whether Slurm is installed on it."""
    monkeypatch.setenv("TOWLINE_ALLOW_LOGIN", "1")
    monkeypatch.delenv("TOWLINE_CLUSTER", raising=False)
