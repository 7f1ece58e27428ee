import hashlib


def length(completion: str, answer: str) -> float:
    return float(len(completion) % 5)


def rare(completion: str, answer: str) -> float:
    """Few of the groups have completions that differ in it."""
    return float(len(completion) % 7 == 0)


def fails_on_one_in_twenty(completion: str, answer: str) -> float:
    return _unless(completion, answer, share=0.05)


def fails_on_every_other(completion: str, answer: str) -> float:
    return _unless(completion, answer, share=0.5)


def _unless(completion: str, answer: str, *, share: float) -> float:
    """The same completions fail in every run."""
    draw = int.from_bytes(hashlib.sha256(f"{completion}|{answer}".encode()).digest()[:4]) / 2**32
    if draw < share:
        raise ZeroDivisionError(f"drew {draw:.3f}")
    return length(completion, answer)
