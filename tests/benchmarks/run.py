"""Every claim on speed, measured in one run: contenders take turns, and their ratios are held to the claims.

    python tests/benchmarks/run.py shards/train                       # photographs, a few hundred or more
    python tests/benchmarks/run.py shards/train --rounds 5 --only ours dali libjpeg --peers-python other/bin/python

Nothing here depends on how fast the machine is: a ratio is that of one round, and the median over the rounds counts, so
that a moment of other load does not decide. The least and the largest are printed beside it; where they lie further
apart than a claim is from 1, it takes more --rounds to tell. What is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STREAM = ["--sampling", "split"]
OURS = {
    "ours": [],
    "ours, trace": ["--trace"],
    "ours, split": STREAM,
    **{f"ours, split, {mix}": [*STREAM, "--mix", mix] for mix in ("pooled", "shuffle", "queue")},
}
COPIED_BYTES = 1 << 30
PEERS = ("recipe", "article", "pillow", "litdata", "dali", "libjpeg")
# (what, against what): the least ratio of images per second.
CLAIMS = {
    ("ours", "recipe"): 8.0,
    ("ours", "article"): 4.0,
    ("ours", "litdata"): 2.5,
    ("ours", "dali"): 1.8,
    ("ours", "libjpeg"): 0.72,
    ("ours, trace", "ours"): 0.98,
    ("ours, split, pooled", "ours, split"): 0.98,
    ("ours, split, shuffle", "ours, split"): 0.98,
    ("ours, split, queue", "ours, split"): 0.98,
    ("make_shards", "tar"): 0.5,
}


def contenders(args: argparse.Namespace) -> dict[str, list[str]]:
    """The command of each; its last line has `images_per_second`."""
    ours = [sys.executable, "-m", "common.benchmark", "-s", args.shards, "-w", str(args.workers)]
    ours += ["--images", "6144", "--json"]  # three seconds and more of each pass: shorter ones scatter by a tenth
    peers = [args.peers_python, str(Path(__file__).with_name("peers.py"))]
    found = {name: [*ours, *flags] for name, flags in OURS.items()}
    found |= {name: [*peers, name, args.shards, str(args.workers)] for name in PEERS}
    return {name: command for name, command in found.items() if not args.only or name in args.only}


def measure(command: list[str]) -> float | None:
    """Images per second as a command says; None where it fails."""
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    try:
        return json.loads(run.stdout.strip().splitlines()[-1])["images_per_second"]
    except (IndexError, ValueError, KeyError):
        print(f"left out: {' '.join(command[-4:])}: {run.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None


def copying(folder: Path) -> dict[str, float]:
    """Images per second of tar, and of make_shards with one process, on the same images in folders.

    They are linked to so often that the start of an interpreter, a third of a second, does not count.
    """
    files = [path for path in folder.rglob("*") if path.is_file()]
    num_copies = -(-COPIED_BYTES // sum(path.stat().st_size for path in files))
    images, found = num_copies * len(files), {}
    with tempfile.TemporaryDirectory() as out:
        first = shutil.copytree(folder, f"{out}/images/copy-0")
        for number in range(1, num_copies):
            shutil.copytree(first, f"{out}/images/copy-{number}", copy_function=os.link)
        commands = {
            "tar": ["tar", "--hard-dereference", "-cf", f"{out}/all.tar", "-C", f"{out}/images", "."],
            "make_shards": [sys.executable, "-m", "common.make_shards", f"{out}/images", f"{out}/shards", "-w", "1"],
        }
        for name, command in commands.items():
            start = time.perf_counter()
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
            found[name] = images / (time.perf_counter() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", help="folder of shards")
    parser.add_argument("--images", type=Path, help="the same images in folders, to time make_shards against tar")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="contenders to run")
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter of those that are not ours")
    args = parser.parse_args()
    args.shards = str(Path(args.shards).resolve())
    rounds: list[dict[str, float]] = []
    commands = contenders(args)
    for _ in range(args.rounds):
        measured = {name: measure(command) for name, command in commands.items()}
        commands = {name: command for name, command in commands.items() if measured[name] is not None}
        copied = copying(args.images.resolve()) if args.images else {}
        rounds.append(copied | {name: rate for name, rate in measured.items() if rate is not None})
    medians = {name: statistics.median(rates[name] for rates in rounds if name in rates) for name in rounds[0]}
    for name, rate in sorted(medians.items(), key=lambda item: item[1]):
        print(f"{name:22s} {rate:8.0f} images/s")
    for (name, other), least in CLAIMS.items():
        ratios = sorted(rates[name] / rates[other] for rates in rounds if name in rates and other in rates)
        if ratios:
            ratio = statistics.median(ratios)
            print(f"{name} / {other}: {ratio:.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), claimed {least}: "
                  f"{'kept' if ratio >= least else 'missed'}")
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
