import json

import pytest

from towline.launcher.model_folder import read_sizes
from towline.trainer.config import LoraConfig


def test_sizes_come_from_config_and_weights(project) -> None:
    sizes = read_sizes(project.model)
    assert sizes.num_parameters == 39 * 8 + 8
    assert (sizes.num_layers, sizes.num_kv_heads, sizes.head_dim, sizes.max_positions) == (2, 1, 4, 32)


def test_heads_without_groups_and_a_text_config_inside_another(project) -> None:
    inner = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 39, "head_dim": 32}
    (project.model / "config.json").write_text(json.dumps({"text_config": inner}))
    sizes = read_sizes(project.model)
    assert (sizes.num_kv_heads, sizes.head_dim, sizes.max_positions) == (4, 32, None)


def test_parts_named_by_the_index_are_summed(project, write_safetensors) -> None:
    (project.model / "model.safetensors").unlink()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name in names:
        write_safetensors(project.model / name, {"weight": [3, 5]})
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    (project.model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_sizes(project.model).num_parameters == 30


def test_a_pickle_is_judged_by_its_size(project) -> None:
    (project.model / "model.safetensors").unlink()
    (project.model / "pytorch_model.bin").write_bytes(bytes(400))
    assert read_sizes(project.model).num_parameters == 100


def test_an_output_layer_of_its_own_is_a_second_table_of_the_vocabulary(project, write_safetensors) -> None:
    assert read_sizes(project.model).num_embedding_parameters == 39 * 8
    shapes = {"model.embed_tokens.weight": [39, 8], "lm_head.weight": [39, 8], "model.norm.weight": [8]}
    write_safetensors(project.model / "model.safetensors", shapes)
    assert read_sizes(project.model).num_embedding_parameters == 2 * 39 * 8


@pytest.mark.parametrize(
    ("targets", "inputs_and_outputs"),
    [(None, 8 + 8 + 8 + 16), (("q_proj",), 8 + 8), (("up_proj", "lm_head"), 8 + 16 + 39 + 8)],
)
def test_adapters_are_counted_from_the_shapes_of_the_layers_that_get_one(
    project, write_safetensors, targets, inputs_and_outputs
) -> None:
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": [39, 8], "lm_head.weight": [39, 8], "model.norm.weight": [8],
        f"{layer}.self_attn.q_proj.weight": [8, 8], f"{layer}.mlp.up_proj.weight": [16, 8],
    }  # fmt: skip
    write_safetensors(project.model / "model.safetensors", shapes)
    sizes = read_sizes(project.model)
    assert sizes.adapter_parameters(LoraConfig(rank=3, target_modules=targets)) == 3 * inputs_and_outputs
    assert sizes.unknown_targets(LoraConfig(target_modules=targets)) == []
    assert sizes.unknown_targets(LoraConfig(target_modules=("q_proj", "proj", "self_attn.q_proj"))) == ["proj"]
    assert sizes.layer_names == ["q_proj", "up_proj"]


def test_adapters_of_pickled_weights_are_not_counted_as_none(project) -> None:
    (project.model / "model.safetensors").unlink()
    (project.model / "pytorch_model.bin").write_bytes(bytes(100))
    assert read_sizes(project.model).adapter_parameters(LoraConfig()) is None
