"""Train an image classifier on tar shards with one process per device: DistributedDataParallel.

    torchrun --nproc_per_node=3 train_ddp.py -s shards/train --val_path shards/val
"""

# ruff: noqa: E402
from common.stop import StopSignals

stop = StopSignals.listen() if __name__ == "__main__" else StopSignals()  # the imports take seconds, a signal may come

import dataclasses

import torch
from torch.nn.parallel import DistributedDataParallel

from common.access.storage import Storage
from common.assembly import check_apart, choose_seed, make_validation, open_run, open_shards, train_loader
from common.config import TrainConfig
from common.distributed import World, choose_devices, process_group
from common.dummy import dummy_index
from common.entry import run_script
from common.evaluate_only import evaluate_only, trained_weights
from common.fields import Fields
from common.launching.device_settings import set_up_device, with_sync_bn
from common.launching.nodes import check_same_settings
from common.loop import Run, fit
from common.model import Normalized, build_model
from common.optim import amp_dtype, build_optimizer, grad_scaler
from common.plan import Plan
from common.running.records import keep_records
from common.running.state import State
from common.step import Recipe, Stepper
from common.transforms import ImageTransform
from common.watch import make_watch


def main() -> None:
    """Parse the command line, find the devices, train."""
    config = TrainConfig.from_command_line(__doc__, sampling="resampled")
    with process_group(choose_devices(config.device, config.gpu), config.timeout, stop) as world:
        train(config, world, [world.device])


def train(config: TrainConfig, world: World, devices: list[torch.device]) -> None:
    """Put a run together from the config, and let it run. Every rank does the same."""
    check_same_settings(world, dataclasses.asdict(config))
    set_up_device(world, deterministic=config.deterministic, amp=config.amp, sync_bn=config.sync_bn)
    memory_format = torch.channels_last if config.channels_last else torch.contiguous_format

    # The data; the folder of the run, and the checkpoint that it goes on from, if any.
    fields = Fields(config.image_field, config.label_field)
    storage = Storage(config.cache_dir, config.cache_size, config.allow_pipe, config.timeout, config.on_error == "skip")
    val_data = open_shards(world, config.val_path, fields, storage) if config.val_path else None
    validation = make_validation(
        val_data, config.batch_size, config.num_workers, world, fields, config.image_size) if val_data else None
    if validation and config.evaluate:
        weights, validation = trained_weights(world, validation, config.resume, config.output, config.weights)
        module, _ = build_model(config.arch, validation.num_classes, weights, 0, config.image_size, new_head=False)
        recipe = Recipe(lr=0.0, amp=amp_dtype(config.amp), memory_format=memory_format)
        return evaluate_only(module, validation, recipe, world, stop, config.predictions, config.max_errors)
    data = dummy_index(config.epoch_samples or 0) if config.dummy else open_shards(
        world, config.shard_path, fields, storage, config.sampling == "exact")
    check_apart(data, val_data)
    folder, saved = open_run(world, "train_ddp", config.output, config.resume)

    # Which sample is read when and by whom: arithmetic, fixed from here on.
    plan = Plan.make(
        data, sampling=config.sampling, mix=config.mix, seed=choose_seed(world, config.seed, saved),
        shuffle=config.shuffle, epoch_samples=config.epoch_samples, batch_size=config.batch_size,
        world_size=world.size, num_workers=config.num_workers, num_epochs=config.n_epochs, max_steps=config.max_steps)
    state = State.from_checkpoint(saved, plan)

    with keep_records(world, folder, plan, state, dataclasses.asdict(config)) as records:
        # The model, and around it what makes it run here.
        watch = make_watch(config.trace, records, devices)
        module, notes = build_model(config.arch, plan.num_classes, config.weights, plan.seed, config.image_size)
        for note in notes:
            records.report.note(note)
        module = with_sync_bn(module, config.sync_bn)
        module.to(world.device).to(memory_format=memory_format)
        if config.compile:
            module.compile()
        model = watch.wrap(Normalized(module, memory_format))
        model = DistributedDataParallel(model, device_ids=world.device_ids, gradient_as_bucket_view=True)

        # How a step is done.
        optimizer = build_optimizer(
            module, config.optimizer, config.lr, config.betas, config.momentum, config.weight_decay)
        scaler = grad_scaler(world.device, amp_dtype(config.amp))
        recipe = Recipe(
            lr=config.lr, schedule=config.schedule, warmup_epochs=config.warmup_epochs, num_epochs=plan.num_epochs,
            steps_per_epoch=plan.steps_per_epoch, global_batch=plan.global_batch, accum=config.accum,
            label_smoothing=config.label_smoothing, clip_grad=config.clip_grad, amp=amp_dtype(config.amp),
            memory_format=memory_format, seed=plan.seed, num_replicas=len(devices))
        stepper = Stepper(model, optimizer, scaler, recipe, world, watch)

        # What it reads.
        transform = ImageTransform(config.image_size, config.augment)
        loader = train_loader(plan, data, world.rank, state.progress, fields, transform)

        run = Run(
            world=world, stepper=stepper, module=module, loader=loader, validation=validation, records=records,
            plan=plan, state=state, stop=stop, num_steps=plan.end_step(state.progress), save_every=config.save_every,
            profile=config.profile)
        run.restore(saved)
        records.finish(fit(run))


if __name__ == "__main__":
    run_script(main, has_ranks=True)
