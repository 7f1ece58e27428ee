"""What a verb comes to: its exit code, and on stderr why it ended early."""

import sys
from collections.abc import Callable

from towline.storage.errors import TowlineError


def carry_out(work: Callable[[], int]) -> int:
    try:
        return work()
    except TowlineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `towline samples | head`
        sys.stderr.close()
        return 0
