"""The command, and what is submitted from Python: `from towline.launcher import submit_experiment`."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: the command's other verbs do without submitit."""
    if name == "submit_experiment":
        from towline.launcher.submit import submit_experiment

        return submit_experiment
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
