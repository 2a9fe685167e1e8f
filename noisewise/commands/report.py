"""Show a run or a comparison as one HTML file, as figures for papers, or live in the browser.

noisewise report out/digits
noisewise report out/digits --figures figures --formats pdf
noisewise report --live runs/first
"""

import argparse
import webbrowser
from pathlib import Path

from noisewise.commands.parser import Parser
from noisewise.report.figures import FORMATS, write_figures
from noisewise.report.page import write_report
from noisewise.report.server import serving


def add_options(parser: Parser) -> None:
    parser.description = __doc__
    parser.add_argument("target", type=Path, help="the folder of a run, or the --out of noisewise compare")
    parser.add_argument("--out", type=Path, help="the HTML file; by default report.html in that folder")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="also write the figures as files, for papers")
    parser.add_argument("--formats", default="png,svg,pdf", help="formats of the figures")
    parser.add_argument("--live", action="store_true", help="serve the page on 127.0.0.1 and update it during training")
    parser.add_argument("--port", type=int, default=0, help="of the live page; 0 takes a free one")
    parser.add_argument("--open", action="store_true", help="open it in the browser")


def run(args: argparse.Namespace) -> int:
    formats = [name.strip() for name in args.formats.split(",")]
    if unknown := [name for name in formats if name not in FORMATS]:
        raise ValueError(f"--formats {unknown[0]!r}: choose from {', '.join(FORMATS)}")
    if args.live:
        if args.out or args.figures:
            raise ValueError("--live writes no files: leave out --out and --figures")
        return live(args.target, args.port, args.open)
    if args.out is not None and args.out.is_dir():
        raise ValueError(f"--out {args.out} is a folder: name the HTML file, as in {args.out / 'report.html'}")
    path = write_report(args.target, args.out)
    print(f"report: {path}")
    if args.figures is not None:
        print("\n".join(str(figure) for figure in write_figures(args.target, args.figures, formats)))
    if args.open:
        webbrowser.open(path.resolve().as_uri())
    return 0


def live(target: Path, port: int, show: bool) -> int:
    """Serve until Ctrl-C."""
    with serving(target, port) as (server, address):
        try:
            print(f"{address}\nThe page renews itself; end with Ctrl-C.", flush=True)
            if show:
                webbrowser.open(address)
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
