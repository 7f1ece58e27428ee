from collections.abc import Callable
from pathlib import Path

import pytest

from towline.jobs.experiment import ExperimentConfig
from towline.jobs.load_experiment import load_experiment
from towline.launcher import processor

ROOT = Path(__file__).parents[2]


def experiment(trainer: str, rollout: str) -> ExperimentConfig:
    overrides = (f"trainer.precision={trainer}", f"rollout.precision={rollout}")
    return load_experiment(ROOT / "jobs/experiments/tiny-grpo.toml", overrides)


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str | None]:
    def answer(flags: str, trainer: str = "bfloat16", rollout: str = "bfloat16") -> str | None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
        monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(processor, "GPUS", tmp_path / "gpus")
        return processor.slow_precision(experiment(trainer, rollout))

    return answer


def test_bfloat16_on_a_processor_without_it_names_the_fields(look: Callable[..., str | None]) -> None:
    assert 'set trainer.precision and rollout.precision = "float32"' in (look("fpu avx avx2") or "")
    assert 'set rollout.precision = "float32"' in (look("fpu avx2", trainer="float32") or "")


@pytest.mark.parametrize("flags", ["avx512_bf16 avx2", "amx_bf16"])
def test_a_processor_with_the_instructions_is_no_reason_to_warn(look: Callable[..., str | None], flags: str) -> None:
    assert look(flags) is None


def test_float32_and_a_gpu_are_no_reason_to_warn(look: Callable[..., str | None], tmp_path: Path) -> None:
    assert look("avx2", "float32", "float32") is None
    (tmp_path / "gpus").mkdir()
    assert look("avx2") is None
