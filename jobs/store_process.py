"""The control store's own tiny process: a TCPStore on a free port, which dies with the run.

It prints host:port, then answers one JSON line on standard input with one on standard output, so that the
supervisor, which has no torch, can read and write too: {"get": NAME} → value or null, {"set": NAME, "value": …} →
true, {"exchange": NAME, "old": …, "value": …} → the value that stands; values are the sealed bytes as latin-1 text. It
ends when its standard input closes.
"""

import json
import os
import signal
import sys
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

_SELF_TIMEOUT_S = 20.0


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        # Slurm sends them to every process of a job that it is going to end: the run needs its store to stop in order.
        signal.signal(number, signal.SIG_IGN)
    interface = os.environ.get("TOWLINE_STORE_HOST", "127.0.0.1")
    # The time-out is for reaching itself: an interface that does not resolve would be tried for five minutes.
    store = TCPStore(interface, 0, None, True, timedelta(seconds=_SELF_TIMEOUT_S), wait_for_workers=False)
    print(f"{interface}:{store.port}", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        if "set" in question:
            store.set(question["set"], question["value"].encode("latin-1"))
            answer = True
        elif "exchange" in question:
            old, new = question["old"].encode("latin-1"), question["value"].encode("latin-1")
            answer = store.compare_set(question["exchange"], old, new).decode("latin-1")
        else:
            name = question["get"]
            answer = store.get(name).decode("latin-1") if store.check([name]) else None
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
