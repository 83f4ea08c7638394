"""ResNet-18 for small images, with a width to vary: the CIFAR-100 model of the paper's Appendix F.2."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from mupscale.system import MupscaleError


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut.append(nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, channels_in, H, W) to (B, channels, H / stride, W / stride)."""
        residual = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(residual + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 whose stages have width, 2 width, 4 width and 8 width channels (Appendix F.2).

    The paper's 0.5x, 1x, 2x and 4x models are width 32, 64, 128 and 256.

    >>> ResNet18(width=4, classes=10).fc
    Linear(in_features=32, out_features=10, bias=True)
    """

    def __init__(self, width: int = 64, classes: int = 100, in_channels: int = 3) -> None:
        super().__init__()
        if min(width, classes, in_channels) < 1:
            raise MupscaleError(
                "a ResNet18 needs positive sizes, but width, classes and in_channels are "
                f"{width}, {classes} and {in_channels}"
            )
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(BasicBlock(width, width, 1), BasicBlock(width, width, 1))
        self.layer2 = nn.Sequential(BasicBlock(width, 2 * width, 2), BasicBlock(2 * width, 2 * width, 1))
        self.layer3 = nn.Sequential(BasicBlock(2 * width, 4 * width, 2), BasicBlock(4 * width, 4 * width, 1))
        self.layer4 = nn.Sequential(BasicBlock(4 * width, 8 * width, 2), BasicBlock(8 * width, 8 * width, 1))
        self.fc = nn.Linear(8 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, in_channels, H, W) to logits (B, classes)."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits
