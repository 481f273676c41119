"""Lightning: metrics logged once per step, at w; accumulation over two batches; logging of rho, sparsity and norms."""

from __future__ import annotations

import argparse
import tempfile

import pytorch_lightning
import torch
import torchmetrics
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

import sparsesam
from sparsesam.integrations.lightning import AccumulatedAscent, SharpnessAwareMonitor


class Classifier(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=10)
        self.test_accuracy = torchmetrics.Accuracy("multiclass", num_classes=10)

    def training_step(self, batch, batch_idx):
        x, y = batch
        outputs = self.net(x)
        loss = F.cross_entropy(outputs, y)
        if not self.optimizers().in_second_pass:  # count and log once per step, at w
            self.accuracy(outputs, y)
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
            self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.test_accuracy(self.net(x), y)
        self.log("test accuracy", self.test_accuracy)

    def configure_optimizers(self):
        base = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        mask = sparsesam.dynamic_mask(sparsity=0.5, refresh=20)
        opt = sparsesam.SSAM(base, self.net, rho=0.1, mask=mask, rho_schedule=sparsesam.Warmup(50))
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=self.trainer.max_epochs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one epoch")
    epochs = 1 if parser.parse_args().quick else 10
    torch.set_num_threads(1)
    pytorch_lightning.seed_everything(0, verbose=False)
    pixels, digits = load_digits(return_X_y=True)
    whole = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits))
    train, test = random_split(whole, [1400, len(whole) - 1400], torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as place:
        logger = pytorch_lightning.loggers.CSVLogger(place)
        trainer = pytorch_lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            accumulate_grad_batches=2,
            callbacks=[AccumulatedAscent(), SharpnessAwareMonitor()],
            logger=logger,
            log_every_n_steps=10,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Classifier()
        trainer.fit(module, DataLoader(train, batch_size=32, shuffle=True))
        shown = {name: round(value.item(), 4) for name, value in trainer.callback_metrics.items()}
        print(shown)
        trainer.test(module, DataLoader(test, batch_size=256), verbose=True)


if __name__ == "__main__":
    main()
