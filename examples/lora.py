"""Sharpness-aware training of LoRA adapters with Hugging Face's Trainer. Nothing is downloaded."""

from __future__ import annotations

import argparse
import tempfile

import torch
import transformers
from peft import LoraConfig, get_peft_model

import sparsesam
from sparsesam.integrations.hugging_face import SharpnessAwareTrainer


def counting(count: int) -> list[dict[str, torch.Tensor]]:
    """Returns sequences that count in steps of 1 to 5; the task is to predict the next number."""
    generator = torch.Generator().manual_seed(0)
    start, step = torch.randint(0, 50, (count, 1), generator=generator), torch.randint(1, 6, (count, 1))
    tokens = (start + step * torch.arange(12)) % 50
    return [{"input_ids": sequence, "labels": sequence} for sequence in tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps")
    steps = 3 if parser.parse_args().quick else 60
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=12, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    pretrained = transformers.GPT2LMHeadModel(config)
    adapters = LoraConfig(r=8, target_modules=["c_attn", "c_fc"], modules_to_save=["wte"], fan_in_fan_out=True)
    model = get_peft_model(pretrained, adapters)
    trainable = [p for p in model.parameters() if p.requires_grad]
    opt = sparsesam.SAM(torch.optim.AdamW(trainable, lr=3e-3), model, rho=0.05)
    with tempfile.TemporaryDirectory() as place:
        arguments = transformers.TrainingArguments(
            place,
            max_steps=steps,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            logging_steps=max(steps // 5, 1),
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = SharpnessAwareTrainer(model, arguments, train_dataset=counting(1024), optimizers=(opt, None))
        trainer.train()
    print(f"{sum(p.numel() for p in trainable)} of {sum(p.numel() for p in model.parameters())} weights were perturbed")


if __name__ == "__main__":
    main()
