"""The nets of ``_nets.py`` in PyTorch, plain and with Opacus.

A private net has the layers that Opacus asks for, ``DPLSTM`` and ``DPMultiheadAttention``; a plain
one those of PyTorch. The weights are as many as in Keras, except that PyTorch's LSTM has a second
bias.
"""

from __future__ import annotations

from typing import Any

import torch
from _nets import CLASSES, LENGTH, MANY_WORDS, WORDS
from torch import nn

WIDTH, HEADS, BLOCKS = 64, 4, 4


class Residual(nn.Module):
    """Adds the output of a branch to that of a shortcut, the input by default."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.branch, self.shortcut = branch, shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branch(x) + (x if self.shortcut is None else self.shortcut(x))


class Positions(nn.Module):
    """Adds a learned vector per position."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(length, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


class Mean(nn.Module):
    """Returns the mean over some axes."""

    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(self.axes)


class Attention(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, private: bool) -> None:
        super().__init__()
        kind = nn.MultiheadAttention
        if private:
            from opacus.layers import DPMultiheadAttention as kind
        self.attention = kind(WIDTH, HEADS, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Last(nn.Module):
    """Returns the last output of an LSTM."""

    def __init__(self, private: bool) -> None:
        super().__init__()
        kind = nn.LSTM
        if private:
            from opacus.layers import DPLSTM as kind
        self.lstm = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0][:, -1]


class Patches(nn.Module):
    """Returns the channels of an image's places as a sequence."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(2).transpose(1, 2)


def _normalized(channels: int, filters: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(channels, filters, 3, stride, padding=1, bias=False)
    return [conv, nn.GroupNorm(8, filters)]


def _resnet() -> list[nn.Module]:
    stack, channels = [*_normalized(3, 16), nn.ReLU()], 16
    for stage, filters in enumerate((16, 32, 64)):
        for block in range(3):
            stride = 2 if stage and not block else 1
            branch = [*_normalized(channels, filters, stride), nn.ReLU()]
            branch += _normalized(filters, filters)
            shortcut = None
            if stride > 1:
                shortcut = nn.Conv2d(channels, filters, 1, stride, bias=False)
            stack += [Residual(nn.Sequential(*branch), shortcut), nn.ReLU()]
            channels = filters
    return [*stack, Mean(2, 3), nn.Linear(channels, CLASSES)]


def _transformer(first: list[nn.Module], length: int, private: bool) -> list[nn.Module]:
    stack = [*first, Positions(length)]
    for _ in range(BLOCKS):
        stack.append(Residual(nn.Sequential(nn.LayerNorm(WIDTH), Attention(private))))
        dense = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
        stack.append(Residual(nn.Sequential(nn.LayerNorm(WIDTH), *dense)))
    return [*stack, nn.LayerNorm(WIDTH), Mean(1), nn.Linear(WIDTH, CLASSES)]


def make_net(name: str, *, private: bool, sparse: bool) -> nn.Module:
    """Returns a net of ``_nets.NETS``; ``sparse`` gives an Embedding sparse gradients."""
    if name == "cnn":
        stack = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.AvgPool2d(2)]
        stack += [nn.Conv2d(16, 16, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()]
        stack += [nn.Linear(400, 16), nn.ReLU(), nn.Linear(16, CLASSES)]
    elif name == "perceptron":
        stack = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
        stack += [nn.Linear(1024, CLASSES)]
    elif name == "embedding":
        stack = [nn.Embedding(MANY_WORDS, 100, sparse=sparse), Mean(1), nn.Linear(100, CLASSES)]
    elif name == "resnet":
        stack = _resnet()
    elif name == "token_transformer":
        stack = _transformer([nn.Embedding(WORDS, WIDTH)], LENGTH, private)
    elif name == "patch_transformer":
        stack = _transformer([nn.Conv2d(1, WIDTH, 4, 4), Patches()], 49, private)
    else:
        stack = [nn.Embedding(WORDS, WIDTH), Last(private), nn.Linear(WIDTH, CLASSES)]
    return nn.Sequential(*stack)


def train(
    rounds: Any, name: str, optimizer: str, data: Any, weights: int, mode: str, noise: float
) -> None:
    """Takes steps on one batch until the parent ends them.

    Args:
        rounds: ``_workers.Rounds``.
        name: the net.
        optimizer: "SGD" or "Adam".
        data: inputs and labels; images have their channels last.
        weights: the number that the net has in Keras.
        mode: "plain", or Opacus's mode of gradients: "ghost" or "hooks".
        noise: the noise multiplier, at a clip of 1.
    """
    private = mode != "plain"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = (torch.from_numpy(part).to(device) for part in data)
    if x.ndim == 4:
        x = x.permute(0, 3, 1, 2).contiguous()
    # Noise is dense, so that a sparse gradient would only cost a conversion.
    net = make_net(name, private=private, sparse=not private and optimizer == "SGD").to(device)
    second_bias = 4 * WIDTH if name == "lstm" else 0
    if sum(part.numel() for part in net.parameters()) != weights + second_bias:
        raise ValueError(f"{name} has other weights in PyTorch than the {weights} in Keras.")
    kind = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}[optimizer]
    inner: Any = kind(net.parameters(), lr=0.1)
    loss: Any = nn.CrossEntropyLoss()
    if private:
        net, inner, loss = _private(net, inner, loss, (x, y), mode, noise)
    while True:
        rounds.before_step()
        inner.zero_grad()
        loss(net(x), y.long()).backward()
        inner.step()
        rounds.after_step()


def _private(net: Any, inner: Any, loss: Any, data: Any, mode: str, noise: float) -> Any:
    from opacus import PrivacyEngine
    from opacus.grad_sample import register_grad_sampler

    # Without a rule, Opacus would take the slower way of torch.func.
    @register_grad_sampler(Positions)
    def of_positions(layer: Any, activations: Any, gradients: Any) -> Any:
        return {layer.weight: gradients}

    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*data), batch_size=len(data[0])
    )
    engine = PrivacyEngine()
    made = engine.make_private(
        module=net,
        optimizer=inner,
        criterion=loss,
        data_loader=loader,
        noise_multiplier=noise,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    return made[0], made[1], made[2] if mode == "ghost" else loss
