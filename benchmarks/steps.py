"""What a step costs in SGD steps: masks and methods, under DDP, compiled, in a tiny model; and its memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import sparsesam
from benchmarks.cases import Batch, Case, OtherCase, Wrap, cifar_batch, sam, ssam
from benchmarks.runner import Session, benchmark
from benchmarks.timing import show
from sparsesam.lab.models import build_model
from sparsesam.replay import Tape

STAGE, TWO_STAGES = ("layer4.*", "fc.*"), ("layer[34].*", "fc.*")
QUICK = {"model": "resnet10-small", "batch": 2}
PERIOD = 5  # of LookSAM

METHODS: dict[str, Wrap] = {
    "SAM": lambda base, model: sparsesam.SAM(base, model, 0.05),
    "ASAM": lambda base, model: sparsesam.SAM(base, model, 0.5, adaptive=True),
    "SAM, radius by layer": lambda base, model: sparsesam.SAM(base, model, 0.01, radius="layer"),
    "SAM, radius by element": lambda base, model: sparsesam.SAM(base, model, 0.001, radius="element"),
    "SAM, two ascent steps": lambda base, model: sparsesam.SAM(base, model, 0.05, ascent_steps=2),
    "SAM-ON": ssam(sparsesam.fixed_mask(types=sparsesam.NORMALIZATION)),
    "GSAM": lambda base, model: sparsesam.GSAM(base, model, 0.05),
    "WSAM": lambda base, model: sparsesam.WSAM(base, model, 0.05),
    "LookSAM, k=5": lambda base, model: sparsesam.LookSAM(base, model, 0.05, every=PERIOD),
    "FriendlySAM": lambda base, model: sparsesam.FriendlySAM(base, model, 0.05),
    "ZSharp": lambda base, model: sparsesam.ZSharp(base, model, 0.05),
    "ESAM": lambda base, model: sparsesam.ESAM(base, model, 0.05),
    "MomentumSAM": lambda base, model: sparsesam.MomentumSAM(base, model, 0.25),
    "ExtrapolatedSAM": lambda base, model: sparsesam.ExtrapolatedSAM(base, model),
}
Make = Callable[[], Case]


def time_steps(session: Session, makes: Mapping[str, Make], *, memory: bool = False) -> dict[str, Case]:
    """Times the cases against SGD, and prints a table."""
    cases = {name: make() for name, make in session.chosen(makes, "SGD").items()}
    peaks = {name: case.peak_bytes() for name, case in cases.items()} if memory else {}
    rows = []
    for name, ratio in session.compare(cases, "SGD").items():
        case, time = cases[name], ratio.per(cases[name].steps)
        relative = [f"{peaks[name] / peaks['SGD']:.3f}"] if memory else []
        rows.append([name, time.milliseconds, str(time), f"{case.passes:.2f}", f"{case.perturbed:.1%}", *relative])
    more = " | peak of live bytes, x SGD" if memory else ""
    show(f" | ms | x SGD (quartiles) | passes | perturbed{more}", rows)
    return cases


def made(model: str, batch: int) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return build_model(model), cifar_batch(batch)


@benchmark(rounds=7, only="", quick=QUICK)
def steps(session: Session, *, model: str = "resnet18", batch: int = 64, memory: bool = False) -> None:
    """What does a step cost with each kind of mask? Masks are made before the timing."""
    network, data = made(model, batch)
    block = sparsesam.fixed_mask("layer4.1.*" if model == "resnet18" else "layer4.0.*", "fc.*")
    stage, more = sparsesam.fixed_mask(*STAGE), sparsesam.fixed_mask(*TWO_STAGES)
    half, tenth = (filters_of_every_layer(network, share) for share in (0.5, 0.1))
    unstructured = sparsesam.random_mask(sparsity=0.5)
    fisher = sparsesam.fisher_mask(data, cross_entropy, sparsity=0.5, samples=min(16, batch))
    dynamic = sparsesam.dynamic_mask(sparsity=0.5, total_steps=10**6, refresh=None)
    wraps: dict[str, Wrap | None] = {
        "SGD": None,
        "SAM": sam,
        "SAM, an eighth of the batch": partial(sparsesam.SAM, rho=0.05, ascent_fraction=1 / 8),
        "SSAM-F, unstructured 50 %": ssam(fisher, norm="full"),
        "SSAM-D, unstructured 50 %": ssam(dynamic, norm="full"),
        "half the filters, explicit": ssam(half),
        "half the filters, implicit": ssam(half, ascent="implicit"),
        "a tenth of the filters, implicit": ssam(tenth, ascent="implicit"),
        "last block": ssam(block),
        "last stage": ssam(stage),
        "last two stages": ssam(more),
        "last stage, a quarter of the batch": ssam(stage, ascent_fraction=0.25),
        "unstructured 50 %, engine on": ssam(unstructured),
        "unstructured 50 %, engine off": ssam(unstructured, engine=False),
    }
    makes: dict[str, Make] = {name: partial(Case, network, data, wrap) for name, wrap in wraps.items()}
    makes["last stage, step(closure)"] = partial(Case, network, data, ssam(stage), closure=True)
    makes["pytorch-optimizer SAM"] = partial(OtherCase, network, data, "SAM")
    makes["pytorch-optimizer LookSAM, k=5"] = partial(OtherCase, network, data, "LookSAM", k=PERIOD)
    time_steps(session, makes, memory=memory)


def filters_of_every_layer(model: nn.Module, share: float) -> sparsesam.MaskRule:
    """Returns a mask of the given share of the filters of every layer, and all biases and normalization parameters."""
    generator = torch.Generator().manual_seed(0)
    masks = {}
    for name, parameter in model.named_parameters():
        mask = torch.ones_like(parameter, dtype=torch.bool)
        if parameter.dim() > 1:
            mask[torch.randperm(len(parameter), generator=generator)[round(share * len(parameter)) :]] = False
        masks[name] = mask
    return sparsesam.fixed_mask(masks)


@benchmark(rounds=7, only="", quick=QUICK)
def methods(session: Session, *, model: str = "resnet18", batch: int = 64, memory: bool = False) -> None:
    """What does a step of every method cost, beside pytorch-optimizer's?"""
    network, data = made(model, batch)
    makes: dict[str, Make] = {"SGD": partial(Case, network, data)}
    for name, wrap in {**METHODS, "last stage": ssam(sparsesam.fixed_mask(*STAGE))}.items():
        makes[name] = partial(Case, network, data, wrap, steps=PERIOD if "LookSAM" in name else 1)
    for name in ("SAM", "FriendlySAM", "WSAM", "GSAM"):
        makes[f"pytorch-optimizer {name}"] = partial(OtherCase, network, data, name)
    makes["pytorch-optimizer LookSAM, k=5"] = partial(OtherCase, network, data, "LookSAM", k=PERIOD)
    time_steps(session, makes, memory=memory)


def last_stage(session: Session, model: str, batch: int, prepare: Callable[[nn.Module], nn.Module]) -> None:
    """Times SGD, SAM and the last stage, each on a copy of the model prepared in the same way."""
    network, data = made(model, batch)
    stage = sparsesam.fixed_mask(*STAGE)
    wraps = {
        "SGD": None,
        "SAM": sam,
        "last stage": ssam(stage),
        'last stage, norm="full"': ssam(stage, norm="full"),
        "last stage, engine off": ssam(stage, engine=False),
    }
    makes = {name: partial(Case, network, data, wrap, prepare=prepare) for name, wrap in wraps.items()}
    print(time_steps(session, makes)["last stage"].optimizer.savings())


@benchmark(rounds=7, threads=1, cpu_time=True, quick=QUICK)
def ddp(session: Session, *, model: str = "resnet18", batch: int = 32) -> None:
    """What does a step cost under DDP? Two ranks with a batch each; times of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(on_rank, (folder, session, model, batch), nprocs=2, start_method="spawn")


def on_rank(rank: int, folder: str, session: Session, model: str, batch: int) -> None:
    torch.set_num_threads(session.threads)
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    if rank != 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # one table is enough
    last_stage(session, model, batch, DistributedDataParallel)
    dist.barrier()
    dist.destroy_process_group()


@benchmark(rounds=7, threads=1, cpu_time=True, quick={**QUICK, "backend": "aot_eager"})
def compiled(session: Session, *, model: str = "resnet18", batch: int = 64, backend: str = "inductor") -> None:
    """What does a step cost with compiled blocks?"""
    torch._dynamo.config.recompile_limit = 100  # every copy of the model compiles its blocks
    last_stage(session, model, batch, partial(sparsesam.compile_blocks, backend=backend))


@benchmark(rounds=2000, threads=1, cpu_time=True)
def tiny(session: Session, *, operations: int = 100) -> None:
    """What do the savings add to a step of a tiny model, and to an operation that is recorded and found again?

    A perceptron 64-64-10, batch 8. The plain steps compute all gradients twice. A chain of operations on that batch
    costs what recording and replaying it takes longer than running it twice.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    data = images, _ = torch.randn(8, 64), torch.randint(10, (8,))
    start = images.clone().requires_grad_()

    def chain() -> torch.Tensor:
        x = start
        for _ in range(operations):
            x = torch.tanh(x)
        return x

    def recorded() -> None:
        tape = Tape(dict(model[2].named_parameters()), between=False)
        with tape.recording():
            first = chain()  # held, so that its memory can be used again
        with tape.replaying():
            chain()
        assert tape.reused == operations, first

    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        name: (Case(model, data, ssam(mask)), Case(model, data, ssam(mask, engine=False)))
        for name, mask in (
            ("last layer", sparsesam.fixed_mask("2.*")),
            ("unstructured 50 %", sparsesam.random_mask(sparsity=0.5)),
        )
    }
    pairs["chain"] = recorded, lambda: (chain(), chain())
    rows = []
    for name, (ours, plain) in pairs.items():
        times = session.compare({"plain": plain, "ours": ours}, "plain")
        added = 1e3 * (times["ours"].seconds - times["plain"].seconds)
        rows.append((name, *(f"{1e3 * times[which].seconds:.3f}" for which in ("ours", "plain")), f"{added:.3f}"))
    show(" | ms | two plain passes | added", rows)
    each = 1e3 * added / operations
    print(f"an operation that is recorded and found again takes {each:.1f} us longer than running it twice")


@benchmark(quick={"width": 64, "model": QUICK["model"]})
def memory(session: Session, *, width: int = 2048, model: str = "resnet18") -> None:
    """How many bytes per parameter does a step need beyond SGD, without and with a new mask?

    In a perceptron with one sample no activations hide a temporary of the optimizer, and one tensor has two thirds of
    the weights.
    """
    torch.manual_seed(0)
    layers = (nn.Linear(1024, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    perceptron = nn.Sequential(*layers), (torch.randn(1, 1024), torch.zeros(1, dtype=torch.long))
    for name, (network, data) in {"perceptron": perceptron, model: made(model, 8)}.items():
        base, parameters = Case(network, data).peak_bytes(), sum(p.numel() for p in network.parameters())
        wraps: dict[str, Wrap] = {"SAM": sam}
        for sparsity in (0.5, 0.9):
            fisher = sparsesam.fisher_mask(data, cross_entropy, sparsity=sparsity, samples=1)
            dynamic = sparsesam.dynamic_mask(sparsity=sparsity, total_steps=100, refresh=None)
            wraps |= {f"SSAM-F {sparsity}": ssam(fisher, norm="full"), f"SSAM-D {sparsity}": ssam(dynamic, norm="full")}
        rows = []
        for method, wrap in wraps.items():
            peaks = [Case(network, data, wrap).peak_bytes(refresh=refresh) for refresh in (False, True)]
            rows.append((method, *(f"{(peak - base) / parameters:.3f}" for peak in peaks)))
        print(f"{name}: {parameters:,} parameters; SGD itself {base / parameters:.2f}")
        show(" | step | with a new mask", rows)
