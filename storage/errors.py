"""Every error that Towline raises on purpose.

    TowlineError                      exit code 1
    ├── InputError                    2: found before anything was started
    │   ├── ConfigError               an experiment or profile file, an option
    │   ├── DataError                 a dataset row or file
    │   ├── ModelError                a model or tokenizer folder
    │   └── RunFolderError            a run folder that is missing, in use or full
    ├── LedgerError                   a shard that is torn, changed or missing
    ├── CheckpointError               a checkpoint that cannot be written, is damaged, or fits another run
    ├── StoreError                    the control store is gone or answers wrongly
    ├── TransferError                 weights did not arrive whole
    ├── ProbeError                    an engine does not compute with the weights it was given
    ├── NumericsError                 loss or gradient not finite
    ├── RewardError                   a step without rewards to learn from
    │   └── FailedScoresError         more completions without a score than scoring.max_failed; on every trainer rank
    ├── SlurmError                    a Slurm command failed or answered wrongly, a job died without a result
    ├── RunStopped                    3: it was told to stop, or would go on in vain
    ├── BudgetReached                 5: the run's node-hours are used up
    └── RunFault                      3 with a checkpoint kept, else 1: a process of the run failed

A message says what was found, what was expected, where, and how to mend it.
"""


class TowlineError(Exception):
    exit_code = 1


class InputError(TowlineError):
    exit_code = 2


class ConfigError(InputError):
    pass


class DataError(InputError):
    pass


class ModelError(InputError):
    pass


class RunFolderError(InputError):
    pass


class LedgerError(TowlineError):
    pass


class CheckpointError(TowlineError):
    pass


class StoreError(TowlineError):
    pass


class TransferError(TowlineError):
    pass


class ProbeError(TowlineError):
    pass


class NumericsError(TowlineError):
    pass


class RewardError(TowlineError):
    pass


class FailedScoresError(RewardError):
    pass


class SlurmError(TowlineError):
    pass


class RunStopped(TowlineError):
    exit_code = 3


class BudgetReached(TowlineError):
    exit_code = 5


class RunFault(TowlineError):
    """A process of the run failed or stalled.

    Args:
        message: the report shown to the user, several lines.
        checkpoint_kept: whether a complete checkpoint exists to go on from.
    """

    def __init__(self, message: str, *, checkpoint_kept: bool) -> None:
        super().__init__(message)
        self.exit_code = 3 if checkpoint_kept else 1
