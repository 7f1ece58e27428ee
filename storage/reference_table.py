"""Log-probs of pairs under the reference of DPO: computed once, one number for each completion (R28).

A table is of one model, one precision and one list of tokenised pairs; its file is named for the pairs.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from towline.storage.columns import read_columns, write_columns
from towline.storage.errors import LedgerError
from towline.storage.ledger_schema import REFERENCE
from towline.storage.publish import replace_whole

KIND = "reference"
_REMEDY = "Name another folder in policy.reference_tables, or remove the file: it is computed again."


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceIdentity:
    model: str
    """`checkpoints.model_identity` of the reference's folder."""
    data: str
    """Digest of the token ids of all pairs, in order."""
    precision: str
    """That it computed in."""


def table_path(folder: Path, identity: ReferenceIdentity) -> Path:
    return folder / f"{identity.data[:16]}.h5"


def write_reference_table(path: Path, identity: ReferenceIdentity, logprobs_P2: NDArray[np.float64]) -> None:
    """
    Args:
        logprobs_P2: [pairs, 2], of chosen and rejected.
    """
    with replace_whole(path) as temporary:
        columns = {"chosen": logprobs_P2[:, 0], "rejected": logprobs_P2[:, 1]}
        write_columns(temporary, KIND, REFERENCE, columns, asdict(identity))


def read_reference_table(path: Path, identity: ReferenceIdentity) -> NDArray[np.float64]:
    """[pairs, 2], of chosen and rejected.

    Raises:
        LedgerError: the file is damaged, or of another model, other pairs or another precision.
    """
    try:
        columns, found, _ = read_columns(path, KIND, REFERENCE)
    except LedgerError as error:
        raise LedgerError(f"{error} {_REMEDY}") from error
    for name, expected in asdict(identity).items():
        if found.get(name) != expected:
            raise LedgerError(
                f"{path}: a reference table for {name} {found.get(name)}, this run has {expected}: its margins would "
                f"be wrong. {_REMEDY}"
            )
    return np.stack([columns["chosen"], columns["rejected"]], axis=1)
