"""Train an image classifier on tar shards with one process per device: DistributedDataParallel.

    torchrun --nproc_per_node=3 train_ddp.py -s shards/train --val_path shards/val
"""

from common.stop import StopSignals

stop = StopSignals.listen() if __name__ == "__main__" else StopSignals()  # before the seconds that the imports take

from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from common.config import TrainConfig  # noqa: E402
from common.distributed import World, process_group  # noqa: E402
from common.entry import run_script  # noqa: E402
from common.loop import fit  # noqa: E402
from common.setup import assemble, open_data, open_run, prepare_model  # noqa: E402


def main() -> None:
    config = TrainConfig.from_command_line(__doc__, sampling="resampled")
    with process_group(config.device, config.timeout) as world:
        train(config, world)
