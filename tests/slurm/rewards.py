"""The reward of the experiments here: it varies between completions, so that something is learned."""


def spread(completion: str, answer: str) -> float:
    return float(sum(map(ord, completion)) % 7)
