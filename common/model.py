"""The model by name: any torchvision classifier, or `tiny`, with seeded, torchvision's or a file's weights.

Also the step from uint8 pixels to the floats that the model takes, done on the device.

    module, notes = build_model("resnet18", num_classes=6, weights="none", seed=0)
    logits = module(normalize(batch.image))
"""

from __future__ import annotations

import difflib
from collections import OrderedDict
from functools import lru_cache

import torch
from torch import Tensor, nn
from torchvision import models

from common.errors import UserError
from common.weights import load_weights

# Of ImageNet's pixels in [0, 1], channel by channel: what torchvision's weights were trained with.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

SHARPNESS = 16.0  # of the soft maximum in `tiny`


def build_model(
    arch: str, num_classes: int, weights: str, seed: int, image_size: int | None = None, new_head: bool = True
) -> tuple[nn.Module, list[str]]:
    """The model on the CPU, in training mode, and notes to print. The scripts call it, on every rank alike.

    `weights` is none, DEFAULT (torchvision's, downloaded once) or a file: a state_dict, or a checkpoint of ours.
    `seed` fixes what is drawn; the global generators stay as they are. With `image_size` (pixels) the vision
    transformers are built for it, and every model is tried on one blank image of that size.
    Weights whose head is for another number of classes get a new one, or are refused where `new_head` is False.
    Raises UserError for an unknown `arch`, a size it does not take, and weights that cannot be had, read or fitted.
    """
    _check_arch(arch)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs too, for good
        module = _construct(arch, num_classes, image_size)
    return module, load_weights(module, arch, weights, new_head)


def _check_arch(arch: str) -> None:
    names = ["tiny", *models.list_models(module=models)]
    if arch not in names:
        close = difflib.get_close_matches(arch.lower(), names, n=3, cutoff=0.5) or ["tiny", "resnet18", "resnet50"]
        raise UserError(f"no such model; --arch {arch}; try {', '.join(close)}, or another classifier of torchvision")


def _construct(arch: str, num_classes: int, image_size: int | None) -> nn.Module:
    if arch == "tiny":
        return _tiny(num_classes)
    options: dict[str, object] = {}
    if arch in ("googlenet", "inception_v3"):
        # No auxiliary heads: they return tuples, and DDP waits for their gradients. Their weights want inputs scaled
        # to [-1, 1]; always done, so that a checkpoint means the same whatever it was started from.
        options = {"aux_logits": False, "init_weights": True, "transform_input": True}
    try:
        if image_size and arch.startswith("vit_"):
            options["image_size"] = image_size
        if image_size and arch.startswith("maxvit_"):
            options["input_size"] = (image_size, image_size)
        module = models.get_model(arch, weights=None, num_classes=num_classes, **options)
        if image_size:
            with torch.no_grad():
                module.eval()(torch.zeros(1, 3, image_size, image_size))
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{arch} does not take this size ({reason}); --image_size {image_size}; "
                        "use 224, or another --arch") from None
    return module.train()


class _SoftMaximum(nn.Module):
    """(n, C, H, W) -> (n, C), a soft maximum. The shapes of a small data set are told by their corners: a mean would
    drown them. Soft, since where two places of a hard maximum tie, the last bits of a sum decide which of them learns.
    """

    def forward(self, features: Tensor) -> Tensor:
        return (features * SHARPNESS).logsumexp(dim=(2, 3)) / SHARPNESS


def _tiny(num_classes: int) -> nn.Module:
    """61 thousand weights, 5 million multiplications for 64 x 64 pixels, but any size will do.

    GroupNorm, so that no sample of a batch sees another; no dropout.
    """

    def block(num_in: int, num_out: int, stride: int) -> nn.Module:
        convolution = nn.Conv2d(num_in, num_out, 3, stride=stride, padding=1, bias=False)
        return nn.Sequential(convolution, nn.GroupNorm(8, num_out), nn.ReLU())

    blocks = nn.Sequential(block(3, 16, 2), block(16, 32, 2), block(32, 64, 2), block(64, 64, 1))
    return nn.Sequential(OrderedDict(features=blocks, pool=_SoftMaximum(), head=nn.Linear(64, num_classes)))


def normalize(image: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
    """uint8 (n, 3, H, W) -> float32 on the same device: (x / 255 - mean) / std, in the same layout or `memory_format`.

    Three kernels. Multiplication and subtraction stay apart on purpose: fused, the rounding of
    a pixel could depend on where in the batch it lies. The training step and the validation call it.
    """
    scale, shift = _scale_and_shift(image.shape[-1], image.device)
    return image.to(torch.float32, memory_format=memory_format).mul_(scale).sub_(shift)


@lru_cache(maxsize=16)
def _scale_and_shift(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Shape (1, 3, 1, width), in channels-last: with a whole row to work on, a CPU is five times faster than with
    three numbers. Kept per device, because a copy to a GPU at each step would wait for it."""
    mean, std = torch.tensor(MEAN, dtype=torch.float64), torch.tensor(STD, dtype=torch.float64)
    rows = [row.float().repeat(width, 1).T[None, :, None] for row in (1 / (255 * std), mean / std)]
    return rows[0].to(device), rows[1].to(device)


class Normalized(nn.Module):
    """A model that takes the loader's uint8 images. DP and DDP go around it: a replica gets a quarter of the bytes."""

    def __init__(self, module: nn.Module, memory_format: torch.memory_format = torch.preserve_format):
        super().__init__()
        self.module, self.memory_format = module, memory_format

    def forward(self, image: Tensor) -> Tensor:
        return self.module(normalize(image, memory_format=self.memory_format))
