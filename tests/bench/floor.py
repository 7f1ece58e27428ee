"""The floor: bare vLLM, bare forward and backward, AdamW, weights handed over in memory. No scoring, no ledger, no
store, no second process.

    floor.py MODEL STEPS CASE
"""

import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import workload
from towline.rollout.engine import GenerationRequest
from towline.rollout.vllm_engine import VllmEngine


def generate(engine: VllmEngine, prompts: list[list[int]], stop: int, step: int) -> list[tuple[list[int], list[int]]]:
    owners = {}
    for number, prompt in enumerate(prompts):
        for sample in range(workload.GROUP_SIZE):
            name = f"{number}.{sample}"
            owners[name] = prompt
            engine.submit(
                GenerationRequest(
                    request_id=name,
                    prompt_token_ids=prompt,
                    seed=1000 * step + len(owners),
                    temperature=1.0,
                    max_tokens=workload.MAX_COMPLETION_TOKENS,
                    stop_token_ids=[stop],
                )
            )
    done = []
    while engine.num_unfinished:
        done += [(owners[generated.request_id], generated.token_ids) for generated in engine.step()]
    return done


def train(model, optimizer, sequences: list[tuple[list[int], list[int]]], pad: int) -> None:
    """One right-padded batch a group, logits of the completions only."""
    total = sum(len(completion) for _, completion in sequences)
    for start in range(0, len(sequences), workload.GROUP_SIZE):
        group = sequences[start : start + workload.GROUP_SIZE]
        longest = max(len(prompt) + len(completion) for prompt, completion in group)
        ids = torch.full((len(group), longest), pad)
        mask = torch.zeros_like(ids)
        for row, (prompt, completion) in enumerate(group):
            ids[row, : len(prompt) + len(completion)] = torch.tensor(prompt + completion)
            mask[row, len(prompt) : len(prompt) + len(completion)] = 1
        first = min(len(prompt) for prompt, _ in group)
        logits = model(input_ids=ids, logits_to_keep=longest - first + 1, use_cache=False).logits[:, :-1]
        targets = ids[:, first:]
        logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        (-(logprobs * mask[:, first:]).sum() / total).backward()
    optimizer.step()
    optimizer.zero_grad()


def hand_over(engine: VllmEngine, model, version: int) -> None:
    engine._engine.collective_rpc("start_weight_update")
    engine._receiver._staged = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    engine.apply(version)


def main(folder: str, steps: int, case: str) -> None:
    engine = VllmEngine(
        Path(folder),
        precision="float32",
        max_context_tokens=workload.CONTEXT_TOKENS,
        max_sequences=64,
        threads=workload.THREADS,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.LEARNING_RATE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.set_num_threads(workload.THREADS)
    prompts = [
        tokenizer.encode(
            tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, tokenize=False)
        )
        for q, _ in workload.questions(case)
    ]
    seconds, tokens = [], []
    for step in range(steps):
        began = workload.now()
        batch = prompts[step * workload.PROMPTS_PER_STEP : (step + 1) * workload.PROMPTS_PER_STEP]
        sequences = generate(engine, batch, tokenizer.eos_token_id, step)
        train(model, optimizer, sequences, tokenizer.eos_token_id)
        hand_over(engine, model, step + 1)
        seconds.append(workload.now() - began)
        tokens.append(sum(len(prompt) + len(completion) for prompt, completion in sequences))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    workload.report(seconds, tokens, {"one process": peak})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
