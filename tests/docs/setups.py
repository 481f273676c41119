"""What the code blocks of each page assume: a small model, data and a loss."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import sparsesam
from tests import cases


def usual(tmp_path):
    """Names that every page may use."""
    model = cases.mlp(torch.float32)
    x, y = cases.vectors(dtype=torch.float32)
    train_set = TensorDataset(*cases.vectors(24, torch.float32))
    base = cases.sgd(model)
    names = {
        "torch": torch,
        "nn": nn,
        "sparsesam": sparsesam,
        "model": model,
        "x": x,
        "y": y,
        "loss_fn": F.cross_entropy,
        "train_set": train_set,
        "loader": DataLoader(train_set, batch_size=8),
        "base": base,
        "opt": sparsesam.SAM(base, model, rho=0.05),
    }
    names["closure"] = cases.closure_for(model, names["opt"], x, y)
    return names


def plain(tmp_path):
    x, y = cases.vectors(dtype=torch.float32)
    micro_batches = list(zip(x.chunk(2), y.chunk(2), strict=True))
    return {"micro_batches": micro_batches, "n": 2, "scaler": torch.amp.GradScaler("cpu")}


def staged(tmp_path):
    """Stages with the names of a ResNet."""
    parts = {f"layer{i}": nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for i in range(1, 5)}
    model = nn.Sequential(OrderedDict({**parts, "fc": nn.Linear(6, 3)}))
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.05)
    return {"model": model, "base": cases.sgd(model), "opt": opt}


def normalized(tmp_path):
    parts = OrderedDict(layer4=nn.Linear(6, 6), norm=nn.LayerNorm(6), fc=nn.Linear(6, 3))
    return {"model": nn.Sequential(parts)}


def lightning(tmp_path):
    import lightning_fabric
    import pytorch_lightning

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"max_epochs": 1, "accelerator": "cpu", "default_root_dir": tmp_path, **dict.fromkeys(quiet, False)}
    fabric = lightning_fabric.Fabric(accelerator="cpu")
    return {"pytorch_lightning": pytorch_lightning, "options": options, "device": "cpu", "fabric": fabric}


def hugging_face(tmp_path):
    import transformers

    size = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    tokens = torch.randint(0, 20, (8, 6))
    silent = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    return {
        "model": model,
        "train_set": [{"input_ids": sequence, "labels": sequence} for sequence in tokens],
        "arguments": transformers.TrainingArguments(tmp_path, num_train_epochs=1, **silent),
        "Seq2SeqTrainer": transformers.Seq2SeqTrainer,
    }


def accelerated(tmp_path):
    import accelerate

    return {"accelerator": accelerate.Accelerator(cpu=True, gradient_accumulation_steps=1)}


def trained_run(tmp_path):
    from sparsesam.lab import cli

    settings = ["--dataset", "digits", "--model", "small-cnn", "--optimizer", "sam", "--epochs", "1"]
    assert cli.main(["train", *settings, "--batch-size", "600", "--out", "runs/a"]) == 0
    return {}


#: By page: what it needs beyond `usual`.
SETUPS = {
    "docs/training-loops.md": plain,
    "README.md": staged,
    "docs/index.md": staged,
    "docs/savings.md": staged,
    "docs/methods.md": normalized,
    "docs/lightning.md": lightning,
    "docs/hugging-face.md": hugging_face,
    "docs/accelerate.md": accelerated,
    "docs/analyze.md": trained_run,
}
