"""One rank of an MPI world that carries out command lines of `towline`, one after the other: FOLDER LINES (JSON).

What it says of each and its exit code are written to FOLDER, and its process id before.
"""

import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from mpi4py import MPI

from towline.launcher.cli import command

folder, rank = Path(sys.argv[1]), MPI.COMM_WORLD.rank
(folder / f"{rank}.pid").write_text(str(os.getpid()))
code = 0
for number, line in enumerate(json.loads(sys.argv[2])):
    with redirect_stdout(StringIO()) as said, redirect_stderr(said):
        code = command(line)
    (folder / f"{number}.{rank}.json").write_text(json.dumps([code, said.getvalue()]))
sys.exit(code)
