"""The peer: TRL's GRPOTrainer with vLLM in the same process, on the workload of workload.py.

    trl_peer.py MODEL STEPS CASE

TRL's colocated mode loads weights into vLLM in place, which the CPU build refuses; here its weight sync goes through
vLLM's layer-wise reload instead, as Towline's does. Nothing else of TRL is changed.
"""

import os
import resource
import sys
from pathlib import Path

os.environ |= {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from bench import workload


def sync_weights(self) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    from towline.rollout.weight_receiver import repack_output_head

    runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
    with torch.no_grad(), set_current_vllm_config(runner.vllm_config):
        initialize_layerwise_reload(runner.model)
        for name, parameter in self._iter_named_params():
            runner.model.load_weights([(name, parameter.detach())])
        finalize_layerwise_reload(runner.model, runner.vllm_config.model_config)
        repack_output_head(runner.model)
    self.llm.reset_prefix_cache()


class _Clock(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.tokens: list[float] = [0.0]

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._began = workload.now()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.seconds.append(workload.now() - self._began)

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "num_tokens" in logs:
            self.tokens.append(logs["num_tokens"])


def main(model: str, steps: int, case: str) -> None:
    VLLMGeneration.sync_weights = sync_weights
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": q}], "gold": a} for q, a in workload.questions(case)]
    )

    def reward(completions, gold, **kwargs):
        return [workload.contains_answer(c[0]["content"], g) for c, g in zip(completions, gold, strict=True)]

    clock = _Clock()
    config = GRPOConfig(
        output_dir="trl",
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        learning_rate=workload.LEARNING_RATE,
        disable_tqdm=True,
        seed=0,
        beta=0.0,
        temperature=1.0,
        per_device_train_batch_size=workload.GROUP_SIZE,
        num_generations=workload.GROUP_SIZE,
        gradient_accumulation_steps=workload.PROMPTS_PER_STEP,
        max_completion_length=workload.MAX_COMPLETION_TOKENS,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=workload.CONTEXT_TOKENS,
    )
    torch.set_num_threads(workload.THREADS)
    GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=data, callbacks=[clock]).train()
    tokens = [int(after - before) for before, after in zip(clock.tokens, clock.tokens[1:], strict=False)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    workload.report(clock.seconds, tokens[:steps], {"one process": peak})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
