"""Other ways to read the same JPEGs into 224-pixel training batches of 64, each timed in a process of its own.

    python tests/benchmarks/peers.py recipe shards/train 2          # prints images/s after the first batch

Names: article, recipe (webdataset's documented multi-GPU pipeline), pillow (webdataset with torchvision on Pillow
images), litdata, dali, libjpeg (the decoder alone, in as many processes: whole images, nothing else). litdata and dali
need `pip install litdata nvidia-dali-cuda130`; the shards need an index (any run of ours leaves one).
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import webdataset as wds
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

BATCH, SIZE, NUM_STEPS = 64, 224, 16
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
FLOATS = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
TRAINING = v2.Compose([v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), *FLOATS])
CENTERED = v2.Compose([v2.Resize(256), v2.CenterCrop(SIZE), v2.Normalize(MEAN, STD)])


def tars(folder: str) -> list[str]:
    return sorted(map(str, Path(folder).glob("*.tar")))


def images_per_second(batches: Iterable) -> float:
    """The better of two runs of NUM_STEPS batches, after the first batch."""
    source, best = iter(batches), 0.0
    next(source)
    for _ in range(2):
        start = time.perf_counter()
        for _ in range(NUM_STEPS):
            next(source)
        best = max(best, NUM_STEPS * BATCH / (time.perf_counter() - start))
    return best


def pixels_and_label(sample: dict) -> tuple[torch.Tensor, int]:
    image = sample["jpg"]
    return (CENTERED if isinstance(image, torch.Tensor) else TRAINING)(image), sample["json"]["label"]


def encoded_and_label(sample: dict) -> tuple[torch.Tensor, int]:
    return TRAINING(Image.open(io.BytesIO(sample["jpg"])).convert("RGB")), json.loads(sample["json"])["label"]


def article(folder: str, num_workers: int) -> float:
    samples = wds.WebDataset(tars(folder), shardshuffle=False).decode("torchrgb").map(pixels_and_label).repeat()
    return images_per_second(wds.WebLoader(samples.batched(BATCH), batch_size=None, num_workers=num_workers))


def recipe(folder: str, num_workers: int) -> float:
    samples = wds.WebDataset(tars(folder), resampled=True).shuffle(1000).decode("pil").map(pixels_and_label)
    loader = wds.WebLoader(samples.batched(BATCH), batch_size=None, num_workers=num_workers)
    return images_per_second(loader.unbatched().shuffle(1000).batched(BATCH))


def pillow(folder: str, num_workers: int) -> float:
    samples = wds.WebDataset(tars(folder), resampled=True).shuffle(1000).map(encoded_and_label)
    return images_per_second(wds.WebLoader(samples.batched(BATCH), batch_size=None, num_workers=num_workers))


def _jpegs(folder: str) -> Iterator[dict]:
    for sample in wds.WebDataset(tars(folder), shardshuffle=False):
        yield {"jpg": sample["jpg"], "json": sample["json"]}


def litdata(folder: str, num_workers: int) -> float:
    import litdata as ld

    with tempfile.TemporaryDirectory() as out:
        ld.optimize(fn=dict, inputs=list(_jpegs(folder)), output_dir=out, num_workers=1, chunk_bytes="8MB")

        def endless() -> Iterator[Any]:
            while True:
                yield from ld.StreamingDataLoader(ld.StreamingDataset(out, shuffle=True, transform=encoded_and_label),
                                                  batch_size=BATCH, num_workers=num_workers, drop_last=True)

        return images_per_second(endless())


def dali(folder: str, num_threads: int) -> float:
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def
    def reading() -> Any:
        indexes = [str(Path(tar).with_suffix(".idx")) for tar in tars(folder)]
        jpg, _ = fn.readers.webdataset(
            paths=tars(folder), index_paths=indexes, ext=["jpg", "json"], random_shuffle=True)
        image = fn.decoders.image_random_crop(jpg, device="cpu", output_type=types.RGB)
        image = fn.resize(image, size=[SIZE, SIZE], antialias=True)
        return fn.crop_mirror_normalize(image, mirror=fn.random.coin_flip(), dtype=types.FLOAT, output_layout="CHW",
                                        mean=[255 * m for m in MEAN], std=[255 * s for s in STD])

    pipeline = reading(batch_size=BATCH, num_threads=num_threads, device_id=None, seed=1)
    pipeline.build()
    return images_per_second(iter(pipeline.run, None))


def _decode(jpegs: list[bytes]) -> None:
    torch.set_num_threads(1)
    for jpeg in jpegs:
        decode_jpeg(torch.frombuffer(bytearray(jpeg), dtype=torch.uint8), ImageReadMode.RGB)


def libjpeg(folder: str, num_processes: int) -> float:
    jpegs = [sample["jpg"] for sample in _jpegs(folder)][: 2 * NUM_STEPS * BATCH]
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:
        parts = [jpegs[i::num_processes] for i in range(num_processes)]
        pool.map(_decode, [part[:8] for part in parts], chunksize=1)
        start = time.perf_counter()
        pool.map(_decode, parts, chunksize=1)
        return len(jpegs) / (time.perf_counter() - start)


PEERS: dict[str, Callable[[str, int], float]] = {
    "article": article, "recipe": recipe, "pillow": pillow, "litdata": litdata, "dali": dali, "libjpeg": libjpeg}

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    name, shards, number = sys.argv[1:4]
    print(json.dumps({"images_per_second": PEERS[name](shards, int(number))}), flush=True)
    os._exit(0)  # endless loaders are in no hurry to end
