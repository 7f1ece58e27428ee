"""Whether this machine computes in bfloat16, or only imitates it."""

from pathlib import Path

from towline.jobs.experiment import ExperimentConfig

CPUINFO = Path("/proc/cpuinfo")
GPUS = Path("/proc/driver/nvidia/gpus")
_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")


def slow_precision(experiment: ExperimentConfig) -> str | None:
    """A warning when bfloat16 is asked of a CPU without instructions for it (measured: 0.8 against 54 GFLOP/s).

    None with an NVIDIA GPU, or where the processor cannot be told.
    """
    fields = [name for name in ("trainer", "rollout") if _is_bfloat16(getattr(experiment, name, None))]
    if not fields or GPUS.is_dir() or not CPUINFO.is_file():
        return None
    flags = next((line.split() for line in CPUINFO.read_text().splitlines() if line.startswith("flags")), None)
    if flags is None or any(name in flags for name in _INSTRUCTIONS):
        return None
    names = " and ".join(f"{name}.precision" for name in fields)
    return f'this processor has no bfloat16 instructions and will be many times slower: set {names} = "float32"'


def _is_bfloat16(room: object) -> bool:
    """An objective without rollouts has no such table."""
    return getattr(room, "precision", None) == "bfloat16"
