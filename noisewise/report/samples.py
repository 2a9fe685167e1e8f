"""Generated samples of all methods side by side, with a slider over training."""

from html import escape

from noisewise.report.html import Part, caption, number, per_schedule
from noisewise.report.subject import Subject
from noisewise.report.thumbnails import Shown, encoded, pictures_of
from noisewise.study.summary import metric_label


def parts(subject: Subject) -> list[Part]:
    """The pictures, if there are any."""
    shown = encoded(pictures_of(subject))
    if not shown:
        return []
    moments = sorted({one.picture.share for one in shown})
    seeds = sorted({one.picture.seed for one in shown})
    blocks = [_figures(subject, process, shown, moments, seeds) for process in subject.schedules]
    same = "" if subject.single else " All methods began from the same noise for each seed."
    intro = f"<p>Samples of the averaged weights, not chosen by hand.{same}</p>"
    html = intro + _slider(subject, shown, moments) + _seeds(seeds) + per_schedule(subject, blocks)
    return [Part("samples", "Samples", html, {"moments": {"texts": _moment_texts(subject, shown, moments)}})]


def _moment_texts(subject: Subject, shown: list[Shown], moments: list[float]) -> list[str]:
    if subject.single:
        steps = {one.picture.share: one.picture.step for one in shown}
        return [f"step {steps[moment]:,}" for moment in moments]
    return [f"{100 * moment:.0f} % of the budget" for moment in moments]


def _slider(subject: Subject, shown: list[Shown], moments: list[float]) -> str:
    texts = _moment_texts(subject, shown, moments)
    if len(moments) < 2:
        return f'<p class="note">At {escape(texts[-1])}.</p>'
    return (
        f'<div class="slider"><label for="moment">Training</label><input type="range" id="moment" min="0" '
        f'max="{len(moments) - 1}" step="1" value="{len(moments) - 1}" aria-valuetext="{escape(texts[-1])}">'
        f'<output for="moment" id="moment-text">{escape(texts[-1])}</output></div>'
    )


def _seeds(seeds: list[int]) -> str:
    if len(seeds) < 2:
        return ""
    choices = "".join(
        f'<label><input type="radio" name="seed" id="seed-{i}" value="{i}"{" checked" * (i == 0)}>'
        f"<span>seed {seed}</span></label>"
        for i, seed in enumerate(seeds)
    )
    return f'<div class="choice seeds" role="group" aria-label="Seed">{choices}</div>'


def _figures(subject: Subject, process: str, shown: list[Shown], moments: list[float], seeds: list[int]) -> str:
    figures = []
    for method in subject.methods_of(process):
        mine = [one for one in shown if one.picture.method == method and one.picture.process == process]
        if not mine:
            continue
        shots = "".join(_shot(subject, one, moments, seeds) for one in mine)
        visible = any(one.picture.share == moments[-1] and one.picture.seed == seeds[0] for one in mine)
        figures.append(
            f'<figure data-method="{method.index}">{caption(method)}'
            f'{shots}<p class="none"{" hidden" * visible}>No picture at this moment.</p></figure>'
        )
    return f'<div class="samples">{"".join(figures)}</div>' if figures else ""


def _shot(subject: Subject, one: Shown, moments: list[float], seeds: list[int]) -> str:
    picture, (width, height) = one.picture, one.size
    moment, seed = moments.index(picture.share), seeds.index(picture.seed)
    value = "" if picture.value is None else f", {metric_label(subject.metric)} {number(picture.value)}"
    hidden = "" if moment == len(moments) - 1 and seed == 0 else " hidden"
    alt = escape(f"Samples of {picture.method.name} at step {picture.step}, seed {picture.seed}")
    return (
        f'<div class="shot" data-moment="{moment}" data-seed="{seed}"{hidden}><img src="{one.address}" width="{width}" '
        f'height="{height}" alt="{alt}"><p>step {picture.step:,}{escape(value)}</p></div>'
    )
