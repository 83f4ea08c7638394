"""Patterns: images: convolutions, channels in groups, shuffles, skips, patches, windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patterns_kit import Network, add, floats, pattern, weight
from toys import of, toy

X = floats(2, 3, 4, 4)
UNEQUAL = "units that grow and inputs that do not lie on one axis of a weight"


class Image(Network):
    """Channels of an image, something between, and a readout of their means."""

    def make(self, k: int, outs: int = 8) -> None:
        self.a, self.c = nn.Conv2d(3, 8 * k, 3, padding=1), nn.Linear(outs * k, 3)

    def mix(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.mix(torch.tanh(self.a(x)))).mean((2, 3)))


def image(name: str, middle: Callable[[int], tuple[nn.Module, ...]], outs: int = 8, **reason: str) -> None:
    """The same, of modules in a row."""

    def build(k: int) -> nn.Module:
        modules = nn.Tanh(), *middle(k), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        return nn.Sequential(nn.Conv2d(3, 8 * k, 3, padding=1), *modules, nn.Linear(outs * k, 3))

    add(f"image, {name}", build, X, **reason)


def flattened(name: str, places: int, pool: Callable[[], nn.Module] = nn.Identity) -> None:
    """A strided layer, a nonlinearity, and a readout of channels and places."""

    def build(k: int) -> nn.Module:
        layers = nn.Conv2d(3, 4 * k, 3, 2, 1), nn.ReLU(), pool(), nn.Flatten()
        return nn.Sequential(*layers, nn.Linear(4 * places * k, 3))

    add(f"image, {name}", build, X)


flattened("flattened to channels and places", 4)
flattened("pooled to places, then flattened", 2, lambda: nn.AdaptiveAvgPool2d((1, 2)))
flattened("max pooling, then flattened", 1, lambda: nn.MaxPool2d(2))
image("batch norm and a bias-free layer", lambda k: (nn.Conv2d(8 * k, 6 * k, 3, bias=False), nn.BatchNorm2d(6 * k)), 6)
image("one filter for each channel", lambda k: (nn.Conv2d(8 * k, 8 * k, 3, groups=8 * k), nn.Conv2d(8 * k, 8 * k, 1)))
image(
    "two filters for each channel",
    lambda k: (nn.Conv2d(8 * k, 16 * k, 3, groups=8 * k), nn.Tanh(), nn.Conv2d(16 * k, 8 * k, 1)),
)
image(
    "groups of channels, their number fixed",
    lambda k: (nn.Conv2d(8 * k, 12 * k, 3, groups=2), nn.Tanh(), nn.Conv2d(12 * k, 8 * k, 1, groups=4)),
)
image("groups of channels, their size fixed", lambda k: (nn.Conv2d(8 * k, 12 * k, 3, groups=2 * k),), 12)
image("transposed layer", lambda k: (nn.ConvTranspose2d(8 * k, 6 * k, 2, 2), nn.Tanh(), nn.Conv2d(6 * k, 8 * k, 1)))
image("transposed layer in groups", lambda k: (nn.ConvTranspose2d(8 * k, 8 * k, 3, groups=2),))
image(
    "transposed layer, one filter for each channel", lambda k: (nn.ConvTranspose2d(8 * k, 8 * k, 2, 2, groups=8 * k),)
)
image("pixel shuffle", lambda k: (nn.Conv2d(8 * k, 16 * k, 1), nn.PixelShuffle(2)), 4)
image("pixel unshuffle", lambda k: (nn.PixelUnshuffle(2), nn.Conv2d(32 * k, 8 * k, 1)))
image(
    "pixel shuffle and back",
    lambda k: (nn.PixelShuffle(2), nn.Tanh(), nn.PixelUnshuffle(2), nn.Conv2d(8 * k, 8 * k, 1)),
)
image("channel dropout", lambda k: (nn.Dropout2d(0.2), nn.Conv2d(8 * k, 8 * k, 1)), either="exact without the dropout")


def shuffle(k: int, groups: int) -> tuple[nn.Module, ...]:
    """Channels of two layers in groups, shuffled between them."""
    first, second = (nn.Conv2d(8 * k, 8 * k, 1, groups=groups) for _ in range(2))
    return first, nn.ChannelShuffle(groups), second


image("nn.ChannelShuffle", lambda k: shuffle(k, 2))
image(
    "nn.ChannelShuffle, number of groups grows",
    lambda k: shuffle(k, 2 * k),
    either="groups of the second layer mix all of the first: copies would lie in another order in each",
)
add(
    "volume",
    lambda k: nn.Sequential(
        nn.Conv3d(2, 4 * k, 2), nn.ReLU(), nn.Conv3d(4 * k, 6 * k, 2), nn.Flatten(), nn.Linear(6 * k, 3)
    ),
    floats(2, 2, 3, 3, 3),
)


@pattern("image, flattened to places and channels", X)
@toy(lambda k: of(a=nn.Conv2d(3, 4 * k, 2, 2), c=(16 * k, 3)))
def channels_last(m: Any, x: Tensor) -> Tensor:
    return m.c(torch.relu(m.a(x)).permute(0, 2, 3, 1).reshape(len(x), -1))


@pattern("image, bare four-dimensional weights", X)
@toy(lambda k: of(u=weight(8 * k, 3, 3, 3), v=weight(8 * k, 6 * k, 2, 2), w=weight(6 * k, 3), b=weight(6 * k)))
def bare4(m: Any, x: Tensor) -> Tensor:
    h = F.conv_transpose2d(torch.tanh(F.conv2d(x, m.u, padding=1)), m.v, m.b, stride=2)
    return torch.einsum("bchw,co->bo", torch.tanh(h), m.w) / h[0, 0].numel()


@pattern("image, a bare filter repeated for all channels", X)
class OneFilter(Image):
    def make(self, k: int) -> None:
        super().make(k)
        self.f = weight(1, 1, 3, 3)

    def mix(self, h: Tensor) -> Tensor:
        return F.conv2d(h, self.f.expand(h.shape[1], -1, -1, -1), groups=h.shape[1])


@pattern("image, kernels mixed for each example, groups of the batch", X)
class Mixed(Image):
    def make(self, k: int) -> None:
        super().make(k)
        self.g, self.w = nn.Linear(8 * k, 3), weight(3, 8 * k, 8 * k, 3, 3, size=0.2)

    def mix(self, h: Tensor) -> Tensor:
        b, c = h.shape[:2]
        w = torch.einsum("be,eoihw->boihw", self.g(h.mean((2, 3))).softmax(-1), self.w).flatten(0, 1)
        return F.conv2d(h.reshape(1, b * c, *h.shape[2:]), w, padding=1, groups=b).view_as(h)


@pattern("image, a residual block in groups with a projection", X)
class Block(Image):
    def make(self, k: int) -> None:
        super().make(k, 12)
        self.us = nn.ModuleList(
            [nn.Conv2d(8 * k, 4 * k, 1, bias=False), nn.Conv2d(4 * k, 4 * k, 3, 2, 1, groups=2, bias=False)]
        )
        self.v, self.p = nn.Conv2d(4 * k, 12 * k, 1, bias=False), nn.Conv2d(8 * k, 12 * k, 1, 2, bias=False)
        self.ns = nn.ModuleList([nn.BatchNorm2d(n * k) for n in (4, 4, 12, 12)])

    def mix(self, h: Tensor) -> Tensor:
        y = h
        for u, n in zip(self.us, self.ns, strict=False):
            y = F.relu(n(u(y)), inplace=True)
        y = self.ns[2](self.v(y))
        y += self.ns[3](self.p(h))
        return y


class Split(Image):
    """Half of the channels pass, half go through a layer, and both are shuffled together, twice."""

    def make(self, k: int) -> None:
        super().make(k)
        self.us = nn.ModuleList([nn.Conv2d(4 * k, 4 * k, 1) for _ in range(2)])

    def mix(self, h: Tensor) -> Tensor:
        for u in self.us:
            x, y = h.chunk(2, 1)
            h = torch.cat((x, torch.tanh(u(y))), 1)
            h = h.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return h


add("image, half of the channels pass, shuffled", Split, X)


@pattern("image, pixel shuffle by hand, channels inside", X)
class ByHand(Image):
    """Places are the outer part of the channel axis, as in einops' '(r s c)'."""

    def make(self, k: int) -> None:
        super().make(k, 4)
        self.u = nn.Conv2d(8 * k, 16 * k, 1)

    def mix(self, h: Tensor) -> Tensor:
        b, _, n, m = h.shape
        return self.u(h).view(b, 2, 2, -1, n, m).permute(0, 3, 4, 1, 5, 2).reshape(b, -1, 2 * n, 2 * m)


@pattern("image, down and up with concatenated skips", X)
class Skips(Network):
    def make(self, k: int) -> None:
        self.a, self.b = nn.Conv2d(3, 4 * k, 3, padding=1), nn.Conv2d(4 * k, 8 * k, 3, padding=1)
        self.u, self.m = nn.ConvTranspose2d(8 * k, 4 * k, 2, 2), nn.Conv2d(8 * k, 4 * k, 3, padding=1)
        self.c = nn.Conv2d(4 * k, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        y = torch.relu(self.b(F.avg_pool2d(h, 2)))
        return self.c(torch.relu(self.m(torch.cat((h, self.u(y)), 1))))


@pattern("image, skips of unequal widths, upsampled", X)
class Unequal(Network):
    def make(self, k: int) -> None:
        self.a, self.b = nn.Conv2d(3, 4 * k, 3, padding=1), nn.Conv2d(4 * k, 12 * k, 3, 2, 1)
        self.n, self.c = nn.GroupNorm(1, 16 * k), nn.Conv2d(16 * k, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = F.interpolate(torch.relu(self.b(h)), scale_factor=2, mode="bilinear", align_corners=False)
        return self.c(self.n(torch.cat((y, h), 1)))


@pattern("image, every layer reads all before it", X)
class Dense(Network):
    def make(self, k: int) -> None:
        self.a = nn.Conv2d(3, 6 * k, 3, padding=1)
        self.us = nn.ModuleList([nn.Conv2d((6 + 4 * i) * k, 4 * k, 3, padding=1) for i in range(3)])
        self.c = nn.Linear(18 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for u in self.us:
            h = torch.cat((h, u(torch.relu(h))), 1)
        return self.c(h.mean((2, 3)))


class Raw(Network):
    """Something that does not grow is concatenated to the channels."""

    def make(self, k: int, how: str) -> None:
        self.how, self.a = how, nn.Conv2d(3, 8 * k, 3, padding=1)
        self.b, self.c = nn.Conv2d(8 * k + (2 if how == "places" else 3), 6 * k, 1), nn.Linear(6 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "input":
            more = x
        else:
            n = torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype)
            more = torch.stack(torch.meshgrid(n, n, indexing="ij")).expand(len(x), -1, -1, -1)
        return self.c(torch.relu(self.b(torch.cat((torch.relu(self.a(x)), more), 1))).mean((2, 3)))


add("image, channels beside the raw image", lambda k: Raw(k, "input"), X, warned=UNEQUAL)
add("image, channels beside coordinates", lambda k: Raw(k, "places"), X, warned=UNEQUAL)


@pattern("image, raw image beside coordinates", X)
@toy(lambda k: of(a=nn.Conv2d(5, 8 * k, 3), c=(8 * k, 3)))
def coordinates(m: Any, x: Tensor) -> Tensor:
    n = torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype)
    more = torch.stack(torch.meshgrid(n, n, indexing="ij")).expand(len(x), -1, -1, -1)
    return m.c(torch.relu(m.a(torch.cat((x, more), 1))).amax((2, 3)))


class Excite(Image):
    """Channels are scaled by something read from the means of all."""

    def make(self, k: int, how: str) -> None:
        super().make(k)
        self.how = how
        if how == "layers":
            self.u, self.v = nn.Conv2d(8 * k, 2 * k, 1), nn.Conv2d(2 * k, 8 * k, 1)
        elif how == "fixed":
            self.u, self.v = nn.Conv2d(8 * k, 2, 1), nn.Conv2d(2, 8 * k, 1)
        elif how == "responses":
            self.g, self.b = weight(1, 1, 1, 8 * k), weight(1, 1, 1, 8 * k)
        elif how.startswith("places"):
            self.w = nn.Conv2d(2, 1, 3, padding=1)
        else:
            self.f = nn.Conv1d(1, 1, 3, padding=1, bias=False, padding_mode="circular" if how == "ring" else "zeros")

    def mix(self, h: Tensor) -> Tensor:
        match self.how:
            case "layers" | "fixed":
                return h * torch.sigmoid(self.v(torch.relu(self.u(h.mean((2, 3), keepdim=True)))))
            case "responses":
                y = h.permute(0, 2, 3, 1)
                size = y.norm(dim=(1, 2), keepdim=True)
                return (self.g * (y * size / (size.mean(-1, keepdim=True) + 1e-2)) + self.b + y).permute(0, 3, 1, 2)
            case "places, amax" | "places, max":
                top = h.amax(1, keepdim=True) if self.how == "places, amax" else h.max(1, keepdim=True)[0]
                return h * torch.sigmoid(self.w(torch.cat((h.mean(1, keepdim=True), top), 1)))
            case _:
                return h * torch.sigmoid(self.f(h.mean((2, 3))[:, None])[:, 0, :, None, None])


add("image, channels excited, inner width grows", lambda k: Excite(k, "layers"), X)
add("image, channels excited, inner width fixed", lambda k: Excite(k, "fixed"), X)
add("image, channels excited by global responses", lambda k: Excite(k, "responses"), X)
add("image, places excited, mean and amax of channels", lambda k: Excite(k, "places, amax"), X)
add(
    "image, places excited, mean and max of channels",
    lambda k: Excite(k, "places, max"),
    X,
    refused="max has one gradient",
)
add("image, channels excited by neighbours", lambda k: Excite(k, "line"), X, refused="neighbours, zeros at the ends")
add("image, channels excited by neighbours on a ring", lambda k: Excite(k, "ring"), X)


class Patches(Network):
    """Patches as positions, a class token, learned places, an encoder, the token is read."""

    def make(self, k: int, how: str) -> None:
        self.how, self.t, self.p = how, weight(1, 1, 8 * k), weight(1, 5, 8 * k)
        self.a: nn.Module = nn.Conv2d(3, 8 * k, 2, 2) if how == "layer" else nn.Linear(12, 8 * k)
        self.m = nn.TransformerEncoderLayer(8 * k, 2 * k, 16 * k, 0.0, "gelu", batch_first=True, norm_first=True)
        self.n, self.c = nn.LayerNorm(8 * k), nn.Linear(8 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "layer":
            h = self.a(x).flatten(2).mT
        elif self.how == "unfold":
            h = self.a(F.unfold(x, 2, stride=2).mT)
        else:
            h = self.a(x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2))
        h = torch.cat((self.t.expand(len(x), -1, -1), h), 1) + self.p
        return self.c(self.n(self.m(h)[:, 0]))


add("patches, a strided layer", lambda k: Patches(k, "layer"), X)
add("patches, F.unfold", lambda k: Patches(k, "unfold"), X)
add("patches, Tensor.unfold", lambda k: Patches(k, "view"), X)


@pattern("patches of channels that grow, F.unfold", X)
class Unfolded(Image):
    def make(self, k: int) -> None:
        super().make(k, 6)
        self.w = weight(6 * k, 8 * k * 4)

    def mix(self, h: Tensor) -> Tensor:
        return (self.w @ F.unfold(h, 2, stride=2)).unflatten(2, (2, 2))


@pattern("windows, attention in each, then merged", X)
class Windows(Network):
    def make(self, k: int) -> None:
        self.a, self.m, self.o = nn.Conv2d(3, 8 * k, 1), nn.Linear(8 * k, 24 * k), nn.Linear(8 * k, 8 * k)
        self.t, self.n, self.r = weight(9, 2 * k), nn.LayerNorm(32 * k), nn.Linear(32 * k, 16 * k, bias=False)
        self.c = nn.Linear(16 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).permute(0, 2, 3, 1)
        b, _, _, n = h.shape
        for shift in (0, -1):
            y = h.roll((shift, shift), (1, 2)).view(b, 2, 2, 2, 2, n).transpose(2, 3).reshape(-1, 4, n)
            q, k, v = self.m(y).view(len(y), 4, 3, -1, 4).permute(2, 0, 3, 1, 4)
            i = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
            far = ((i[:, None] - i[None] + 1) * torch.tensor([3, 1])).sum(-1)
            z = (q @ k.mT / 2 + self.t[far].permute(2, 0, 1)).softmax(-1) @ v
            z = self.o(z.transpose(1, 2).reshape(-1, 4, n)).view(b, 2, 2, 2, 2, n).transpose(2, 3).reshape(h.shape)
            h = h + z.roll((-shift, -shift), (1, 2))
        near = [h[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.c(self.r(self.n(torch.cat(near, -1))).mean((1, 2)))


@pattern("mixing of positions, then of units", floats(2, 6, 5))
class Mixer(Network):
    def make(self, k: int) -> None:
        self.a, self.n, self.m = nn.Linear(5, 8 * k), nn.LayerNorm(8 * k), nn.LayerNorm(8 * k)
        self.c = nn.Linear(8 * k, 3)
        self.p = nn.Sequential(nn.Linear(6, 4 * k), nn.GELU(), nn.Linear(4 * k, 6))
        self.q = nn.Sequential(nn.Linear(8 * k, 16 * k), nn.GELU(), nn.Linear(16 * k, 8 * k))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = h + self.p(self.n(h).transpose(1, 2)).transpose(1, 2)
        h = h + self.q(self.m(h))
        return self.c(h.mean(1))


@pattern("image, a modern block with a scale per channel", X)
class Modern(Image):
    def make(self, k: int) -> None:
        super().make(k)
        self.d, self.n, self.g = nn.Conv2d(8 * k, 8 * k, 3, padding=1, groups=8 * k), nn.LayerNorm(8 * k), weight(8 * k)
        self.u, self.v = nn.Linear(8 * k, 16 * k), nn.Linear(16 * k, 8 * k)

    def mix(self, h: Tensor) -> Tensor:
        y = self.n(self.d(h).permute(0, 2, 3, 1))
        return h + (self.g * self.v(F.gelu(self.u(y)))).permute(0, 3, 1, 2)


@pattern("image, places compare with places, without a scale", X)
class NonLocal(Image):
    """Three 1x1 layers, all pairs of places, a softmax: scores grow by k."""

    def make(self, k: int) -> None:
        super().make(k)
        self.p, self.q, self.r = (nn.Conv2d(8 * k, 4 * k, 1) for _ in range(3))
        self.o = nn.Conv2d(4 * k, 8 * k, 1)

    def mix(self, h: Tensor) -> Tensor:
        q, k, v = (w(h).flatten(2) for w in (self.p, self.q, self.r))
        return h + self.o((v @ torch.einsum("bcn,bcm->bmn", q, k).softmax(1)).view(len(h), -1, *h.shape[2:]))


@pattern("image, products of channels, flattened", X)
@toy(lambda k: of(a=nn.Conv2d(3, 4 * k, 2), c=(16 * k * k, 3)))
def gram(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x)).flatten(2)
    return m.c((h @ h.mT / h.shape[-1]).flatten(1))


@pattern("image, where each channel looks", X)
@toy(lambda k: of(a=nn.Conv2d(3, 6 * k, 3, padding=1), c=(12 * k, 3)))
def looks(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).flatten(2).softmax(-1).view(len(x), -1, 4, 4)
    n = torch.arange(4, dtype=x.dtype)
    return m.c(torch.stack(((h.sum(2) * n).sum(-1), (h.sum(3) * n).sum(-1)), -1).flatten(1))


@pattern("image, residuals to centres, normed twice", X)
@toy(lambda k: of(a=nn.Conv2d(3, 8 * k, 1), g=nn.Conv2d(8 * k, 4, 1), m=weight(4, 8 * k), c=(32 * k, 3)))
def centres(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    p, y = m.g(h).softmax(1).flatten(2), h.flatten(2).mT
    v = torch.einsum("bkn,bnkd->bkd", p, y[:, :, None] - m.m)
    return m.c(F.normalize(F.normalize(v, dim=-1).flatten(1), dim=-1))


@pattern("image, style written into the statistics of channels", X, floats(2, 4))
class Style(Image):
    def make(self, k: int) -> None:
        super().make(k)
        self.s = nn.Linear(4, 16 * k)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        h = torch.relu(self.a(x))
        s, t = self.s(z)[..., None, None].unflatten(1, (2, -1)).unbind(1)
        h = (h - h.mean((2, 3), keepdim=True)) / (h.std((2, 3), keepdim=True) + 1e-2)
        return self.c(torch.relu(h * (1 + s) + t).mean((2, 3)))
