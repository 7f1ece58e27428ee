def length(completion: str, answer: str) -> float:
    return float(len(completion) % 5)
