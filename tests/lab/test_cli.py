import re
import subprocess
import sys
from importlib import metadata

import pytest
import torch
import yaml
from PIL import Image

from sparsesam.lab.cli import COMMANDS, main
from sparsesam.lab.commands import data
from sparsesam.lab.experiment import read_records
from sparsesam.lab.inspection import ANALYSES

SHORT = ["--train-size", "64", "--test-size", "40", "--epochs", "1", "--threads", "1", "--logger", "none"]
SPARSE = [*SHORT, "--fisher-samples", "8"]


def test_train_prints_each_epoch_and_accuracy(tmp_path, capsys):
    assert main(["train", *SPARSE, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "epoch 1/1  loss" in printed
    assert "density 0.500  rho 0.1" in printed
    assert "test accuracy" in printed


def test_options_override_file(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump({"optimizer": "sam", "rho": 0.3, "batch_size": 32}))
    main(["train", *SHORT, "--config", str(file), "--rho", "0.4", "--out", str(tmp_path / "run")])
    config = read_records(tmp_path / "run" / "records.jsonl")[0]["config"]
    assert (config["optimizer"], config["rho"], config["batch_size"], config["epochs"]) == ("sam", 0.4, 32, 1)
    assert main(["train", "--config", str(tmp_path / "run" / "config.yaml"), "--out", str(tmp_path / "again")]) == 0
    assert read_records(tmp_path / "again" / "records.jsonl")[0]["config"] == config


NO_EFFECT = " has no effect with optimizer "
REFUSED = [
    ("trian", "unknown command 'trian'; did you mean train?"),
    ("train --sparsty 0.5", "unknown option 'sparsty'; did you mean sparsity"),
    ("train --config bad.yaml", "unknown option 'epoch'; did you mean epochs"),
    ("train --optimizer other", "--optimizer must be one of 'sgd', "),
    ("train --optimizer ssam_f", "did you mean ssam-f?"),
    ("train --adaptive fully", "--adaptive must be true or false or one of 'all', 'layer', got 'fully'"),
    ("train --epochs 0", "epochs must be at least 1, got 0"),
    ("train --dataset cifra10", "did you mean cifar10 or cifar100?"),
    ("train --accelerator tape", "accelerator tape, devices 1, num_nodes 1 is not available on this machine: "),
    ("train --out bad.yaml/run", "is not a directory that can be written to; choose another --out"),
    ("train --resume", "--resume needs --out"),
    ("train --resume --out .", "has no run: there is no config.yaml"),
    ("train --optimizer ssam", "ssam-f chooses the weights by Fisher information"),
    ("train --optimizer sgd --rho 0.1", NO_EFFECT),  # also if it is the default
    ("train --optimizer sam --layers fc.*", NO_EFFECT),
    ("train --lr-gamma 0.2", NO_EFFECT),
    ("train --config settings.yaml --optimizer sam", NO_EFFECT),
    ("train --init-from none.pt", "none.pt does not exist"),
    ("train --dataset cifar10 --data-dir none", "none"),
    ("train --dataset folder", "--data-dir"),
    ("train --config none.yaml", "none.yaml cannot be read: [Errno 2] No such file"),
    ("train --config damaged.yaml", "damaged.yaml cannot be read: while parsing"),
    ("sweep damaged.yaml", "damaged.yaml: "),
    ("sweep demo --data-dir none", "none"),
    ("sweep demo --set init_from=none.pt", "none.pt does not exist"),
    ("sweep demo --seeds 0", "--seeds must be at least 1"),
    ("sweep demo --jobs 0", "--jobs must be at least 1"),
    ("data show --images 0", "--images must be at least 1"),
    ("export none -o model.onnx", "--out must end in .pt, .pth, .safetensors"),
    ("eval .", "has no run"),
    ("analyze hessian none", "none has no run"),
    ("report none", "RUNS must be directories, got 'none'"),
    ("paper show", "`paper show` needs a table or figure"),
]


@pytest.mark.parametrize(("command", "reason"), REFUSED, ids=[command for command, _ in REFUSED])
def test_bad_usage_exits_with_2_and_one_line_and_writes_nothing(command, reason, tmp_path, monkeypatch, capsys):
    files = {"bad": "epoch: 3\n", "damaged": "epochs: [1", "settings": "pattern: filter\nfisher_samples: 128\n"}
    for name, content in files.items():
        (tmp_path / f"{name}.yaml").write_text(content)
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("sparsesam")
    assert reason in printed
    assert printed.count("\n") == 1
    assert sorted(path.stem for path in tmp_path.iterdir()) == list(files)


def test_help_has_groups_and_names_of_models_and_data_sets(capsys):
    assert main(["train", "--help"]) == 0
    printed = capsys.readouterr().out
    for heading in ("data:", "model:", "optimizer:", "perturbation:", "training:", "files and machine:"):
        assert f"\n{heading}\n" in printed
    words = " ".join(printed.split())
    assert "digits, fashion-mnist, cifar10, cifar100, imagenet, tiny-imagenet, folder, hf/NAME" in words
    assert "wrn-28-10, " in words
    assert "(default: 0.05)" in words
    assert "type:" not in printed
    assert "Literal" not in printed


def test_eval_and_export_read_best_or_last_weights(tmp_path, capsys):
    out = str(tmp_path / "run")
    assert main(["train", *SPARSE, "--out", out, "--val-size", "50", "--name", "first"]) == 0
    assert "chosen on validation images" in capsys.readouterr().out
    assert main(["eval", out, "--weights", "last"]) == 0
    record = read_records(tmp_path / "run" / "records.jsonl")[-1]
    assert f"test accuracy {record['test_accuracy']:.2%}, loss {record['test_loss']:.4f}" in capsys.readouterr().out
    assert main(["eval", out, "--split", "val"]) == 0
    assert "val accuracy" in capsys.readouterr().out
    for name in ("model.safetensors", "model.pt"):
        file = tmp_path / ("exported" if name == "model.pt" else "run") / name  # also beside the run's own files
        assert main(["export", out, "-o", str(file)]) == 0
        assert main(["eval", out, "--weights", str(file)]) == 0
        assert str(file) in capsys.readouterr().out
        assert main(["train", *SPARSE, "--init-from", str(file), "--out", str(tmp_path / name)]) == 0
    weights = torch.load(tmp_path / "exported" / "model.pt", weights_only=True)
    assert all(isinstance(value, torch.Tensor) for value in weights.values())
    assert main(["eval", out, "--weights", str(tmp_path / "none.pt")]) == 2


def test_layers_and_budget_choose_what_is_perturbed(tmp_path, capsys):
    for options in (["--layers", "12.*"], ["--budget", "1.5", "--fisher-samples", "8"]):
        out = tmp_path / options[0]
        assert main(["train", *SHORT, *options, "--out", str(out), "--model", "small-cnn"]) == 0
        header, *_, result = read_records(out / "records.jsonl")
        assert (header["config"]["optimizer"], header["config"]["norm"]) == ("ssam", "masked")
        assert 0 < result["sparsity"] < 1
        assert result["budget"] == (1.5 if options[0] == "--budget" else None)
    assert 1 < result["forward_backwards_per_step"] < 2
    assert f"{result['forward_backwards_per_step']:.2f} passes per step, budget 1.5; " in capsys.readouterr().out


def test_data_show_draws_what_network_sees_and_marks_changed_labels(tmp_path, monkeypatch, capsys):
    show = ["data", "show", "--label-noise", "0.3", "--out", str(tmp_path / "sheet.png")]
    assert main([*show, "--images", "6"]) == 0
    assert "6 images of digits" in capsys.readouterr().out
    assert Image.open(tmp_path / "sheet.png").size[0] > 100
    drawn = []
    monkeypatch.setattr(data, "write_images", lambda images, titles, file, columns: drawn.extend(titles))
    assert main([*show, "--images", "200"]) == 0
    changed = [title for title in drawn if ", was " in title]
    assert all(re.fullmatch(r"\d(, was \d)?", title) for title in drawn)
    assert all(title[0] != title[-1] for title in changed)
    assert 30 < len(changed) < 90


@pytest.mark.parametrize("arguments", [["report", "."], ["data", "show"], ["analyze", "hessian", "run"]], ids=" ".join)
def test_output_that_cannot_be_made_is_one_line_with_remedy(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    option, name = ("--plot", "a.png") if arguments[0] == "analyze" else ("--out", "a.png")
    assert main([*arguments, option, f"file/folder/{name}"]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"sparsesam: {option} 'file/folder/a.png' cannot be written")
    assert text.endswith("choose a directory you can write to\n")


def test_paper_lists_and_shows(capsys):
    assert main(["paper", "list"]) == 0
    assert "ablation-update-mask" in capsys.readouterr().out
    assert main(["paper", "show", "rho-imagenet", "--scale", "full"]) == 0
    assert "77.25" in capsys.readouterr().out


def test_without_command_lists_commands(capsys):
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert "sweep    train a grid" in capsys.readouterr().out


@pytest.mark.parametrize("command", [*([name] for name in COMMANDS), *(["analyze", name] for name in ANALYSES)])
def test_every_command_has_help(command, capsys):
    assert main([*command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: sparsesam {command[0]}")


def test_help_and_typos_import_no_slow_package():
    """Lightning, torchmetrics and what they import take several times as long as torch."""
    given = [[], *([command, "--help"] for command in COMMANDS), ["trian"], ["train", "--lrr"]]
    code = (
        "import sys, torch, numpy; before = set(sys.modules); from sparsesam.lab.cli import main\n"
        f"for arguments in {given}: main(arguments)\nprint(*set(sys.modules) - before, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = {name.partition(".")[0] for name in done.stderr.splitlines()[-1].split()}
    light = {"sparsesam", "torch", "numpy", "yaml", "_yaml", "rich", "filelock", "joblib", "psutil", "cloudpickle"}
    assert (found & metadata.packages_distributions().keys()) - light == set()
