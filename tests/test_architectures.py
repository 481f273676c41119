"""Tiny transformers architectures with random weights: the engine changes only the cost."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch

import sparsesam
from tests import cases

transformers = pytest.importorskip("transformers")

#: options that make a configuration tiny, where it has them
TINY = {
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "dim", "embedding_size"], 16),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"], 2),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads", "num_experts", "num_local_experts"], 2),
    **dict.fromkeys(["d_ff", "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"], 32),
    **dict.fromkeys(["hidden_dim", "n_inner", "ffn_hidden_size", "image_size"], 32),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_seq_len"], 64),
    **dict.fromkeys(["head_dim", "d_kv", "patch_size"], 8),
    **dict.fromkeys(["rotary_dim", "window_size"], 4),
    **dict.fromkeys(["bos_token_id", "decoder_start_token_id"], 1),
    "eos_token_id": 2,
    "pad_token_id": 0,
    "vocab_size": 40,
    "use_cache": False,
}

ENCODERS = """
    bert roberta distilbert electra mpnet albert camembert deberta deberta-v2 layoutlm nystromformer roformer
    rembert fnet ernie modernbert convbert squeezebert
"""
DECODERS = """
    gpt2 gpt_neox gptj opt bloom llama mistral qwen2 qwen3 gemma gemma2 phi phi3 falcon stablelm starcoder2 olmo olmo2
    mamba cohere granite
"""
TEXT = {
    **{kind: {} for kind in (ENCODERS + DECODERS).split()},
    "longformer": {"attention_window": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mobilebert": {"intra_bottleneck_size": 16, "true_hidden_size": 16},
}
PAIRS = {kind: {} for kind in ["t5", "bart", "mbart", "pegasus", "marian", "blenderbot", "m2m_100"]}
IMAGES = {
    **{kind: {} for kind in ["vit", "deit", "beit", "dinov2", "vit_mae"]},
    "swin": {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "patch_size": 4},
    "swinv2": {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "patch_size": 4},
    "convnext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
    "convnextv2": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "regnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "poolformer": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    "segformer": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]},
}
CONVOLUTIONS = {"conv_dim": (8, 8), "conv_kernel": (8, 4), "conv_stride": (4, 2), "num_feat_extract_layers": 2}
WAVES = {**CONVOLUTIONS, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.2}
AUDIO = dict.fromkeys(["wav2vec2", "hubert", "wavlm"], WAVES)


def build(kind, options):
    config = transformers.AutoConfig.for_model(kind)
    own = [key for key in TINY if key in vars(config) and key not in config.attribute_map]
    chosen = {key: TINY[key] for key in own} | options
    config = transformers.AutoConfig.for_model(kind, **chosen)
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(config).double().train()


def inputs_of(kind, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 40, (2, 2, 8), generator=generator)
    if kind in TEXT:
        return {"input_ids": tokens[0]}
    if kind in PAIRS:
        return {"input_ids": tokens[0], "decoder_input_ids": tokens[1]}
    name, shape = ("pixel_values", (3, 32, 32)) if kind in IMAGES else ("input_values", (256,))
    return {name: torch.randn(2, *shape, generator=generator, dtype=torch.float64)}


ALL = {**TEXT, **PAIRS, **IMAGES, **AUDIO}


def train(model, kind, mask, way, *, engine):
    """Two steps of a copy of the model; returns what it has learned, and the operations reused."""
    model = copy.deepcopy(model)
    opt = cases.ssam(model, mask, rho=0.05, engine=engine)
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002 (what models draw their masks from)
    for inputs in (inputs_of(kind, seed) for seed in range(2)):
        cases.WAYS[way](opt, lambda inputs=inputs: model(**inputs)[0].sin().mean())
    return model.state_dict(), opt.savings().reused


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ALL)
def test_leaving_out_work_changes_no_bit(kind):
    model = build(kind, ALL[kind])
    assert sum(p.numel() for p in model.parameters()) < 2_000_000
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    last_layers = sparsesam.fixed_mask(*names[-max(1, len(names) // 4) :])
    for way in cases.WAYS:
        (ours, reused), (plain, _) = (train(model, kind, last_layers, way, engine=engine) for engine in (True, False))
        assert reused > 0
        assert cases.same_bits(ours.values(), plain.values())
    filters = cases.every_other_filter(model)  # sums of some filters have another order
    (ours, _), (plain, _) = (train(model, kind, filters, "minimize", engine=engine) for engine in (True, False))
    torch.testing.assert_close(ours, plain, rtol=1e-8, atol=1e-10)
