"""Log-probs and their gradients: 4,096 tokens, a vocabulary of 49,152, model dim 576, float32, one thread.

    python tests/bench/logprobs.py [--check] [--repeats N]

Forward and backward of the same policy loss, each way in processes of its own: CPU seconds of the process, least of the
repeats, and peak memory above the inputs, largest of them. Ratios are log_softmax's figure over ours, so that more is
better. --check exits 1 below a bar.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time

import psutil
import torch

from towline.trainer.fused_loss import differentiated, fused_token_loss
from towline.trainer.logprobs import token_logprobs, token_logprobs_and_entropy
from towline.trainer.losses import policy_loss

NUM_TOKENS, VOCABULARY, DIM = 4096, 49152, 576
BARS = {
    "logprobs_memory_vs_log_softmax": 7.0,
    "logprobs_cpu_vs_log_softmax": 1 / 1.35,
    "fused_memory_vs_log_softmax": 7.0,
    "fused_cpu_vs_log_softmax": 1.0,
}


def log_softmax(hidden_TD, weight_VD, targets_T, loss):
    logprobs_TV = torch.log_softmax(hidden_TD @ weight_VD.T, -1)
    return loss(logprobs_TV.gather(-1, targets_T[:, None])[:, 0], slice(None))


def any_loss(hidden_TD, weight_VD, targets_T, loss):
    return loss(token_logprobs(hidden_TD, weight_VD, targets_T), slice(None))


def any_loss_and_entropy(hidden_TD, weight_VD, targets_T, loss):
    return loss(token_logprobs_and_entropy(hidden_TD, weight_VD, targets_T)[0], slice(None))


def fused(hidden_TD, weight_VD, targets_T, loss):
    return fused_token_loss(hidden_TD, weight_VD, targets_T, differentiated(loss))[0]


def fused_and_entropy(hidden_TD, weight_VD, targets_T, loss):
    return fused_token_loss(hidden_TD, weight_VD, targets_T, differentiated(loss), with_entropy=True)[0]


WAYS = {
    "log_softmax": log_softmax,
    "token_logprobs": any_loss,
    "token_logprobs, entropy": any_loss_and_entropy,
    "fused_token_loss": fused,
    "fused_token_loss, entropy": fused_and_entropy,
}


def measure(way: str) -> dict:
    """In a process of its own: seconds, MiB, and what was computed, to be compared."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(NUM_TOKENS, DIM, generator=generator)
    weight_VD = torch.randn(VOCABULARY, DIM, generator=generator).mul_(0.05)
    targets_T = torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=generator)
    # Logits of variance 576 x 0.05^2: log-probs are about -log(49152) - 0.7, give or take 1.2.
    old_T = torch.randn(NUM_TOKENS, generator=generator) - 11.5
    advantages_T = torch.randn(NUM_TOKENS, generator=generator)

    def compute(num_tokens, vocabulary):
        def loss(logprobs_C, tokens):
            weights_C = torch.full_like(logprobs_C, 1 / num_tokens)
            old_C, advantages_C = old_T[:num_tokens][tokens], advantages_T[:num_tokens][tokens]
            return policy_loss(logprobs_C, old_C, advantages_C, weights_C).loss

        few_TD = hidden_TD[:num_tokens].detach().requires_grad_()
        few_VD = weight_VD[:vocabulary].detach().requires_grad_()
        value = WAYS[way](few_TD, few_VD, targets_T[:num_tokens] % vocabulary, loss)
        return value, *torch.autograd.grad(value, (few_TD, few_VD))

    compute(16, 1024)  # Loads what is loaded at first use.
    before = psutil.Process().memory_info().rss
    began = time.process_time()
    results = compute(NUM_TOKENS, VOCABULARY)
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "seconds": seconds,
        "mib": (peak - before) / 2**20,
        "results": [result.double().norm().item() for result in results],
    }


def run(way: str) -> dict:
    command = [sys.executable, __file__, "--measure", way]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 below a bar")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each way")
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return 0
    # In turns: what else runs on the machine then hits all alike.
    rounds = [{way: run(way) for way in WAYS} for _ in range(options.repeats)]
    wanted = rounds[0]["log_softmax"]["results"]
    for way in WAYS:
        for found, expected in zip(rounds[0][way]["results"], wanted, strict=True):
            assert abs(found - expected) <= 1e-4 * abs(expected), f"{way}: {found}, log_softmax: {expected}"
    seconds = {way: min(results[way]["seconds"] for results in rounds) for way in WAYS}
    mib = {way: max(results[way]["mib"] for results in rounds) for way in WAYS}
    print(f"{'':28}{'CPU s':>8}{'of it':>8}{'peak MiB':>10}{'of it':>8}")
    for way in WAYS:
        time_share, memory_share = seconds[way] / seconds["log_softmax"], mib[way] / mib["log_softmax"]
        print(f"{way:28}{seconds[way]:8.2f}{time_share:8.2f}{mib[way]:10.0f}{memory_share:8.3f}")
    ratios = {
        f"{name}_{kind}_vs_log_softmax": figures["log_softmax"] / figures[way]
        for name, way in (("logprobs", "token_logprobs"), ("fused", "fused_token_loss"))
        for kind, figures in (("memory", mib), ("cpu", seconds))
    }
    for name, ratio in ratios.items():
        print(f"{name} ratio {ratio:.2f} bar {BARS[name]:.2f}")
    return int(options.check and any(ratio < BARS[name] for name, ratio in ratios.items()))


if __name__ == "__main__":
    sys.exit(main())
