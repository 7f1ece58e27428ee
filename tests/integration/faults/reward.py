def length(completion: str, answer: str) -> float:
    return float(len(completion) % 5)


def rare(completion: str, answer: str) -> float:
    """Few of the groups have completions that differ in it."""
    return float(len(completion) % 7 == 0)
