"""The flags of make_shards, and what they take.

    args = make_parser(__doc__).parse_args(["images/", "shards/", "-w", "8"])
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from common.processes import available_cpus
from common.writing.image_files import VERIFY

ADVICE = "SRC is a folder with one subfolder per class, a .csv or .jsonl manifest, or torchvision:NAME"


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m common.make_shards`; what it gives are the fields of its Options, SRC and OUT."""
    parser = argparse.ArgumentParser("python -m common.make_shards", description=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", metavar="SRC", help=ADVICE.removeprefix("SRC is "))
    add("out", metavar="OUT", help="folder for the shards")
    add("-w", "--num_workers", type=_at_least(0), default=available_cpus(),
        help="processes (default: one for each core, here %(default)s)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--samples_per_shard", type=_at_least(1), default=1000, help="(default: %(default)s)")
    size.add_argument("--shard_size", type=_bytes,
                      help="bytes of a tar instead, such as 500M; roughly so where images are converted")
    add("--name", type=_name, help="shards are NAME-0000.tar, … (default: the name of their folder)")
    add("--val_fraction", type=_fraction,
        help="this part of each class goes to OUT/val, the rest to OUT/train (default: all straight into OUT)")
    add("--seed", type=_at_least(-1), default=0,
        help="of the order and of the validation images; -1 keeps the order of SRC (default: %(default)s)")
    add("--resize", type=_at_least(1),
        help="shrink the shorter side to so many pixels (default: bytes are copied untouched)")
    add("--verify", choices=VERIFY, default="header",
        help="full: decode every image, reject what the decoder complains of; header: look at first and last bytes, "
             "decode only where they leave a doubt; none (default: %(default)s)")
    add("--root", help="folder of a torchvision data set; nothing is downloaded")
    add("--split", help="train or test, or what the torchvision data set calls its splits (default: its own)")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--part", type=_part, metavar="I/N",
                      help="write only every N-th shard, from number I (0 … N-1) on")
    part.add_argument("--finish", action="store_true", help="when all parts are written: check them, write info.json")
    part.add_argument("--overwrite", action="store_true", help="first remove what an earlier run left in OUT")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return int(text)

    return number


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([kKMG]?)B?", text)
    if not match or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no number of bytes, such as 500M")
    return int(match[1]) * {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9}[match[2]]


def _fraction(text: str) -> float:
    if not 0 < float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return float(text)


def _name(text: str) -> str:
    if not re.fullmatch(r"[^\s/.{}*?\[\]]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} holds blanks, slashes, dots or signs of patterns")
    return text


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text} is not I/N with I from 0 to N-1")
    return int(match[1]), int(match[2])
