"""The parts of a run that take more than a line to make, put together by the scripts from the values of a config.

    data = open_shards(world, ("shards/train",), Fields())
    folder, saved = open_run(world, "train_single", output=None, resume="none")
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common import checkpoint, dummy
from common.access.storage import Storage
from common.access.urls import shown
from common.batch_dataset import BatchDataset
from common.dataset import EpochPlan, ExactSource, Source, StreamSource
from common.distributed import World
from common.dummy import DummySource, Noise
from common.evaluation import Validation
from common.fields import Fields
from common.launching.failure import SharedError
from common.launching.nodes import check_shards
from common.loader import Loader
from common.mixing import Mix
from common.plan import Plan
from common.running.relaunch import agent_name, is_restart
from common.running.run_folder import RunFolder
from common.sampling import Progress, num_steps
from common.shards import ShardIndex
from common.transforms import ImageTransform

Saved = dict[str, Any]


def open_shards(world: World, patterns: Sequence[str], fields: Fields | None, storage: Storage | None = None,
                exact: bool = True) -> ShardIndex:
    """The index of a data set: read or made by rank 0, the same on every rank, of shards that every node sees.

    `fields` say where images and labels are; None: there need be none. `exact`: they are going to be read by position,
    as validation always does.
    """
    bar = partial(tqdm, desc="scanning shards", disable=None, leave=False)
    index = world.on_main(lambda: ShardIndex.open(
        patterns, fields, lambda items, total: bar(items, total=total), storage, labels=fields is not None))
    if exact:
        index.storage.check_positions(index.paths)
    check_shards(world, index.paths)
    return index


def check_apart(data: ShardIndex, val_data: ShardIndex | None) -> None:
    """Raise SharedError where a shard would be trained on and validated on. Every rank calls it."""
    trained = {os.path.realpath(path) for path in data.paths}
    same = [path for path in (val_data.paths if val_data else ()) if os.path.realpath(path) in trained]
    if same:
        raise SharedError(f"validation on training shards; --val_path, shard {shown(same[0])}; name others than "
                          "--shard_path")


def open_run(world: World, script: str, output: str | None, resume: str) -> tuple[RunFolder, Saved | None]:
    """The folder of the run, and the checkpoint that it goes on from (None: from the start), the same on every rank."""
    agents, counted = world.gather(agent_name(os.environ)), any(world.gather(is_restart(os.environ)))

    def find() -> tuple[RunFolder, Saved | None]:
        folder = RunFolder.open(script, output, resume=resume != "none", agents=agents, counted=counted)
        checkpoint.clean(folder.path)
        if resume == "auto" or folder.restarted:  # a restart goes on by itself
            found = checkpoint.newest(folder.path, set_aside=True)
            if found is not None or resume in ("none", "auto"):
                if found is None:
                    hint = "" if output or folder.restarted else " (a new folder: --resume auto looks in --output)"
                    print(f"no checkpoint in {folder.path}{hint}: the run starts from the beginning", flush=True)
                return folder, found[1] if found else None
        return folder, None if resume == "none" else checkpoint.load_for_resume(Path(resume))

    return world.on_main(find)


def choose_seed(world: World, seed: int | None, saved: Saved | None) -> int:
    """The seed that was given, else that of the run to be continued, else one drawn by rank 0."""
    if seed is None and saved is not None:
        return int(saved["plan"]["seed"])
    return world.broadcast(secrets.randbelow(1 << 31) if seed is None else seed)


def train_loader(plan: Plan, data: ShardIndex, rank: int, progress: Progress, fields: Fields,
                 transform: ImageTransform) -> Loader:
    """The loader of one rank's part of every step that is left."""
    num_workers, known = plan.workers_of(rank), classified(fields, data)
    if not data.paths:
        known, transform = dummy.FIELDS, Noise(transform.size)
    mixing = Mix(plan.mix, plan.batch_size, max(num_workers, 1), plan.seed)
    source = make_source(plan, data, rank, progress)
    dataset = BatchDataset(source, mixing, known, transform, data.storage.skip_errors)
    return Loader(dataset, num_workers, timeout_seconds=data.storage.timeout_seconds)


def make_source(plan: Plan, data: ShardIndex, rank: int, progress: Progress) -> Source:
    """Where one rank's samples of every step that is left come from."""
    epochs = EpochPlan(
        plan.epoch_samples, plan.global_batch, plan.num_epochs, rank, plan.world_size, plan.seed, plan.shuffle,
        drop_last=plan.drop_last, progress=progress)
    if not data.paths:
        return DummySource(data, epochs)
    if plan.sampling == "exact":
        return ExactSource(data, epochs)
    return StreamSource(data, epochs, plan.sampling == "resampled")


def make_validation(data: ShardIndex, batch_size: int, num_workers: int, world: World, fields: Fields,
                    image_size: int) -> Validation:
    """The validation set, in its own order; batch t goes whole to rank t % world size."""
    epochs = EpochPlan(data.num_samples, batch_size, 1, world.rank, world.size, seed=0, window=-1)
    source, mixing = ExactSource(data, epochs, whole_batches=True), Mix("none", batch_size, max(num_workers, 1), 0)
    dataset = BatchDataset(source, mixing, classified(fields, data), ImageTransform(image_size, "center"),
                           data.storage.skip_errors)
    loader = Loader(dataset, num_workers, timeout_seconds=data.storage.timeout_seconds)
    return Validation(lambda: iter(loader), num_steps(data.num_samples, batch_size),
                      data.num_classes, data.classes)


def classified(fields: Fields, data: ShardIndex) -> Fields:
    """The fields, with what this data set knows of its classes and images."""
    return dataclasses.replace(
        fields, num_classes=data.num_classes, classes=data.classes, first_image=data.first_image)
