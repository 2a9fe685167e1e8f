"""Turn images into latents that noisewise train reads as --data.source latents --data.path OUT.

Repeat an interrupted command to finish it.

    noisewise encode --data images --options "{size: 256}" --autoencoder my-pipeline --subfolder vae --out latents
"""

import argparse
from pathlib import Path

from noisewise.commands.generate import DEVICES, place
from noisewise.commands.parser import Parser
from noisewise.data import SOURCES, open_data
from noisewise.plain_files import writing
from noisewise.training.display import Count
from noisewise.training.options import read_mapping
from noisewise.training.signals import StopRequest


def add_options(parser: Parser) -> None:
    parser.description = __doc__
    parser.add_argument("--data", required=True, help="where the images are")
    parser.add_argument("--source", default="folder", choices=sorted(SOURCES), help="kind of data (default: folder)")
    parser.add_argument("--split", default="train", help="split of the source (default: train)")
    parser.add_argument("--options", type=read_mapping, default={}, help="settings of the source as YAML, such as {size: 256}")
    parser.add_argument("--autoencoder", required=True, help="folder or hub id of a diffusers AutoencoderKL or VQModel")
    parser.add_argument("--subfolder", help="subfolder of the autoencoder, such as vae")
    parser.add_argument("--out", required=True, type=Path, help="a new folder")
    parser.add_argument("--batch", type=int, default=32, help="images at a time")
    parser.add_argument("--device", default="auto", choices=DEVICES, help="auto takes a GPU if there is one")
    parser.add_argument("--store", default="float16", choices=["float16", "float32"], help="precision on disk")


def run(args: argparse.Namespace) -> int:
    with StopRequest() as stop, stop.at_once():  # SIGTERM too ends it in good order
        return _encode(args)


def _encode(args: argparse.Namespace) -> int:
    from noisewise.data.encoding import encode, partial_of  # which need diffusers: seconds

    device = place(args.device)
    source = open_data(args.source, args.data, split=args.split, options=args.options)
    with Count("encoding", len(source)).shown() as done, writing(f"--out {args.out}", partial_of(args.out)):
        encode(
            source,
            args.autoencoder,
            args.out,
            batch=args.batch,
            device=device,
            store=args.store,
            subfolder=args.subfolder,
            progress=done.reach,
        )
    print(f"latents: {args.out}")
    return 0
