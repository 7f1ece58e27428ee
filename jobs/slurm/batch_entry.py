"""Start a submitted callable inside its job: `python -m towline.jobs.slurm.batch_entry FOLDER [NAME [COMPONENT]]`.

Any Python 3 reads this file: a node with another one than the submission's often has none of our packages either, and
must still say so in words. Everything else is in `run_callable`.
"""

import json
import os
import sys
import traceback


def main():
    # It kept the working folder off our own import path, and is not for what we start.
    os.environ.pop("PYTHONSAFEPATH", None)
    try:
        from towline.jobs.slurm.run_callable import main as run
    except Exception as error:  # the process's own boundary
        traceback.print_exc()
        print(_cannot_start(sys.argv[1:], error), file=sys.stderr)
        return 2
    return run()


def _cannot_start(arguments, error):
    folder, name = [*arguments, "callable"][:2]
    submission = os.path.join(folder, name)
    try:
        with open(submission + ".json") as file:
            written = json.load(file)["python"]
    except (OSError, ValueError, KeyError):
        written = "not known"
    return (
        "error: {}.pkl was written by Python {}, but this node runs Python {}.{}.{} ({}), which cannot import Towline: "
        "{}: {}. Expected the Python that submitted, with its packages, visible on every node, and not "
        "another in `setup`."
    ).format(submission, written, *sys.version_info[:3], sys.executable, type(error).__name__, error)


if __name__ == "__main__":
    sys.exit(main())
