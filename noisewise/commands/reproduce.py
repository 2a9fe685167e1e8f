"""Reproduce a table or figure of the papers, on one page with the paper's numbers and ours.

Each is a few noisewise compare and analyze commands, which the page shows. The same command continues where it was stopped,
and tables and figures share runs. Settings of noisewise train may follow.

    noisewise reproduce --list
    noisewise reproduce table1
    noisewise reproduce fig2 fig4 --scale small
"""

import argparse
import shlex
from dataclasses import replace
from pathlib import Path

from noisewise.commands.parser import Parser
from noisewise.papers import SCALES, STUDIES
from noisewise.papers.evidence import Scale
from noisewise.plain_files import replace_file
from noisewise.study.outcome import NoneFinished, read_comparison
from noisewise.words import closest

DONE = "commands.txt"  # those that have come to their end in a folder


def add_options(parser: Parser) -> None:
    parser.description = __doc__
    parser.set_defaults(settings=[])
    parser.add_argument("items", nargs="*", metavar="ITEM", help=f"{', '.join(STUDIES)}, or all")
    parser.add_argument(
        "--scale", choices=SCALES, default="toy", help="; ".join(f"{name}: {what}" for name, what in SCALES.items())
    )
    parser.add_argument("--list", action="store_true", help="list what each shows, what it needs and how long it takes")
    parser.add_argument(
        "--out", type=Path, default=Path("out") / "reproduce", help="folder for runs and pages, with a subfolder for each scale"
    )


def run(args: argparse.Namespace) -> int:
    if args.list or not args.items:
        print(listed(args.scale))
        return 0
    names = list(STUDIES) if "all" in args.items else list(dict.fromkeys(args.items))
    for name in names:
        if name not in STUDIES:
            meant = closest(name, STUDIES)
            hint = f"; did you mean {meant}?" if meant else ""
            raise ValueError(f"there is no {name!r} to reproduce: choose from {', '.join(STUDIES)}, or all{hint}")
    folder = args.out / args.scale
    for name in names:
        scale = replace(STUDIES[name].scales[args.scale], settings=args.settings)
        study = replace(STUDIES[name], scales={args.scale: scale})
        if not reproduced(scale, folder):
            print("the same command goes on where it was stopped")
            return 0
        from noisewise.papers.paper_page import write_page  # late: it draws

        page, found = write_page(name, study, args.scale, folder)
        print(f"\n{study.source}\n  the paper: {study.says}\n  ours: {found}\npage: {page}")
    return 0


def listed(scale: str) -> str:
    """All studies, at one scale."""
    others = ", ".join(one for one in SCALES if one != scale)
    estimated = "" if scale == "toy" else " Times are estimates."
    lines = [f"{scale}: {SCALES[scale]}.{estimated} Other scales: {others}.", ""]
    for name, study in STUDIES.items():
        made = study.scales[scale]
        lines += [f"{name:<12} {study.title} ({study.source})", f"{'':<12} takes {made.takes}"]
        lines += [f"{'':<12} needs {made.needs}"] if made.needs else []
    return "\n".join(lines)


def reproduced(scale: Scale, folder: Path) -> bool:
    """Run the commands of a study that are not done yet; False if it was stopped."""
    try:
        return all(finished(words) for words in scale.words(folder))
    except FileNotFoundError as error:
        if not scale.needs:
            raise
        raise FileNotFoundError(f"{error} (it needs {scale.needs})") from error


def finished(words: list[str]) -> bool:
    """Run one command, if need be; False if it was stopped before its end."""
    from noisewise.commands.cli import run_command, whole_parser

    out, line = Path(words[-1]), shlex.join(words)
    done = (out / DONE).read_text().splitlines() if (out / DONE).is_file() else []
    if line in done:
        return True
    print(f"\nnoisewise {line}", flush=True)
    if words[0] == "compare" and "digits" not in words:
        from noisewise.metrics.inception import find_weights

        find_weights()  # or an hour of training would end without a FID
    status = run_command(whole_parser(), words)
    ended = {"finished"} if words[0] == "analyze" else endings(out)
    if status and "unfinished" not in ended:
        raise NoneFinished(f"no run of {out} finished: see the reasons above")
    if ended == {"finished"}:  # what failed is tried again the next time
        replace_file(out / DONE, "\n".join([*done, line]) + "\n")
    return "unfinished" not in ended


def endings(folder: Path) -> set[str]:
    """How the runs of a comparison have ended: "finished", "failed", or "unfinished" for those that were stopped."""
    comparison = read_comparison(folder)
    begun = {outcome.folder.name: outcome.status for outcome in comparison.outcomes}
    return {begun.get(name, "unfinished") for name in comparison.plan.runs}
