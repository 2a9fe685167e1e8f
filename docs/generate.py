"""Writes what can be computed into the pages: README.md, docs/**/*.md and benchmarks/*.md.

    python docs/generate.py            write all places anew
    python docs/generate.py --check    name the places that are stale, and exit with 1 if there are any

A place is what stands between `<!-- generated: NAME WORDS -->` and `<!-- end -->`. NAME is a key of MADE or FILLED below,
WORDS are its arguments. MADE functions write the whole place, from files in benchmarks/results/ or from the code. FILLED
functions write columns of a table that is there; all other columns are words of the page.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from tables import cards, cifar10, digits, estimators, field, long, papers, settings, speed, study, table

ROOT = Path(__file__).parent.parent
PLACE = re.compile(r"(<!-- generated: ([^\n]*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
MADE: dict[str, Callable[..., str]] = {
    "measured": cards.measured,
    # CIFAR-10
    "front": cifar10.front,
    "margins": cifar10.margins,
    "larger": cifar10.larger,
    "methods": field.methods,
    "every-method": field.every_method,
    "unets": cifar10.unets,
    "cifar10-strata": cifar10.strata,
    "cifar10-search": cifar10.search,
    "cifar10-levels": cifar10.levels,
    "cifar10-confirmation": cifar10.confirmation,
    "method-cost": cifar10.method_cost,
    "field": field.field,
    "field-targets": field.field_targets,
    "field-objectives": field.field_objectives,
    "v2-runs": long.runs,
    "v2-ratios": long.ratios,
    "v2-map": long.what_pictures_want,
    "v2-solvers": long.by_solver,
    "small-images": long.small_images,
    "small-images-solvers": long.small_images_by_solver,
    "small-images-map": long.small_images_want,
    "v2-branches": long.branches,
    "v2-losses": long.losses_by_tenth,
    "v2-beside": long.losses_beside_uniform,
    "v2-noise": long.noise_of_draws,
    "v2-left": long.left_to_learn,
    "v2-cut": long.cut,
    # digits
    "digits-strata": digits.strata,
    "digits-screen": digits.screen,
    "digits-longer": digits.longer,
    "digits-warmup": digits.warmup,
    "digits-bells": digits.bells,
    "digits-search": digits.search,
    "digits-estimators": digits.estimators,
    "digits-variance": digits.variance,
    "finetune": digits.finetune,
    # estimators of adaptive
    "thirds": estimators.thirds,
    "frechet": estimators.frechet,
    "gains": estimators.gains,
    "outcomes": estimators.outcomes,
    "cost": estimators.cost,
    # speed
    "paths": speed.paths,
    "transformers": speed.transformers,
    "probe-cost": speed.probes,
    "earlier-paths": speed.earlier_paths,
    "set-up": speed.set_up,
    "profile": speed.profile,
    "changes": speed.changes,
    "sizes": speed.sizes,
    "loss-curves": speed.loss_curves,
    "generation": speed.generation,
    "preset-cost": study.preset_cost,
    "checkpoint-cost": speed.checkpoint_cost,
    # the demo, analyses, FID
    "demo": study.demo,
    "demo-losses": study.demo_losses,
    "found-gradients": study.gradients,
    "found-interdependence": study.interdependence,
    "found-density": study.density,
    "found-ablate": study.ablate,
    "found-predictor": study.predictor,
    "found-overhead": study.overhead,
    "found-increments": study.increments,
    "fid-sanity": study.fid_sanity,
    # the papers
    "papers": papers.found,
    "papers-notes": papers.notes,
    # the code
    "processes": settings.processes,
    "usual-solvers": settings.usual_solvers,
    "example": settings.example,
}
FILLED: dict[str, Callable[..., None]] = {
    "settings": settings.sampler_or_weighting,
    "estimators": settings.estimators,
    "estimator": settings.estimator,
    "options": settings.options,
    "options-of": settings.options_of,
    "presets": settings.presets,
    "networks": settings.networks,
}


def pages() -> list[Path]:
    """All that may have places."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]


def regenerated(text: str) -> str:
    """The text of a page with all its places made anew."""
    return PLACE.sub(lambda found: f"{found[1]}\n{place(found[2], found[3])}\n\n{found[4]}", text)


def place(name: str, text: str) -> str:
    """What a place should hold; `text` is what it has."""
    first, *words = name.split()
    if first in MADE:
        return MADE[first](*words)
    if first not in FILLED:
        raise ValueError(f"nothing makes {first!r}: it is no key of MADE or FILLED in docs/generate.py")
    heads, _, *lines = [re.split(r"\s*(?<!\\)\|\s*", line.strip())[1:-1] for line in text.strip().splitlines()]
    rows = [dict(zip(heads, cells, strict=True)) for cells in lines]
    FILLED[first](rows, *words)
    return table(heads, (list(row.values()) for row in rows))


def stale() -> list[str]:
    """The places that are not what they should be, as `PAGE: NAME`; why, if they cannot be made."""
    found = []
    for path in pages():
        for _, name, text, _ in PLACE.findall(path.read_text()):
            try:
                same = text.strip() == place(name, text)
            except Exception as error:
                same, name = False, f"{name}: {error}"
            if not same:
                found.append(f"{path.relative_to(ROOT)}: {name}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    if parser.parse_args().check:
        found = stale()
        print("\n".join(found) if found else "all places are up to date")
        return bool(found)
    for path in pages():
        try:
            text = regenerated(path.read_text())
        except Exception as error:
            raise SystemExit(f"{path.relative_to(ROOT)}: {error}") from error
        if text != path.read_text():
            path.write_text(text)
            print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
