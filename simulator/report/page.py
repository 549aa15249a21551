"""A report as one HTML file: the table and its charts; it needs neither a network nor scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from simulator.report.charts import Chart, Line, stroke, svg
from simulator.report.summary import Summary, Targets
from simulator.report.text import rows
from simulator.requests import Request

_POINTS = 200
_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1180px;padding:0 1rem;
color:#1f2937;background:#fff}
h1{font-size:1.4rem}h2{font-size:1rem;margin:0 0 .3rem}h1,code{overflow-wrap:anywhere}
.wide{overflow-x:auto}table{border-collapse:collapse;margin:1rem 0}
th,td{padding:.25rem .75rem;border-bottom:1px solid #e5e7eb;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left;font-weight:normal;white-space:normal;
min-width:min(17em,40vw);position:sticky;left:0;background:inherit}tr{background:#fff}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));gap:1.5rem}
figure{margin:0}svg{width:100%;height:auto}svg text{font-size:12px;fill:#4b5563}
.grid{stroke:#e5e7eb}.mark{stroke:#111827;stroke-dasharray:4 3}
.key{display:inline-block;margin-right:1.2em}
.key svg{width:2.2em;height:.8em;margin-right:.4em}
@media(prefers-color-scheme:dark){body{color:#e5e7eb;background:#111827}tr{background:#111827}
th,td{border-color:#374151}svg text{fill:#9ca3af}.grid{stroke:#374151}.mark{stroke:#f9fafb}}
"""


def report_page(
    title: str, command: str, runs: Sequence[tuple[Summary, Sequence[Request]]], targets: Targets
) -> str:
    """The page about fleets that served the same trace; `command` made it."""
    summaries = [summary for summary, _ in runs]
    keys = "".join(
        '<span class="key"><svg viewBox="0 0 33 12" aria-hidden="true">'
        f'<line x2="33" y1="6" y2="6" {stroke(number)}/></svg>{escape(each.fleet)}</span>'
        for number, each in enumerate(summaries)
    )
    charts = [(chart.title, svg(chart)) for chart in _charts(runs, targets)]
    figures = "".join(
        f"<figure><h2>{escape(title)}</h2>{drawn}</figure>" for title, drawn in charts if drawn
    )
    if not figures:
        keys = "No request was served, so there is nothing to draw."
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>{escape(title)}</h1><p><code>{escape(command)}</code></p>"
        f'{_table(summaries, targets)}<p>{keys}</p><div class="charts">{figures}</div>'
        "</main></body></html>\n"
    )


def _table(summaries: Sequence[Summary], targets: Targets) -> str:
    head = "".join(f'<th scope="col">{escape(each.fleet)}</th>' for each in summaries)
    body = []
    for name, write in rows(targets):
        cells = [write(each) for each in summaries]
        if any(cells):
            row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            body.append(f'<tr><th scope="row">{escape(name)}</th>{row}</tr>')
    return (
        '<div class="wide" tabindex="0" role="region" aria-label="the numbers of each fleet">'
        f"<table><thead><tr><td></td>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _charts(runs: Sequence[tuple[Summary, Sequence[Request]]], targets: Targets) -> list[Chart]:
    served = [
        (summary.fleet, [each for each in requests if not each.failure])
        for summary, requests in runs
    ]
    ttft = [Line(n, _shares([e.ttft_s * 1000 for e in each])) for n, each in served]
    tpot = [
        Line(n, _shares([e.tpot_s * 1000 for e in each if e.num_output > 1])) for n, each in served
    ]
    waiting = [Line(n, in_flight([(e.arrival, e.first_token) for e in each])) for n, each in served]
    running = [Line(n, in_flight([(e.first_token, e.end) for e in each])) for n, each in served]
    late = [Line(n, _worst_ttft(each)) for n, each in served]
    return [
        Chart("Share of requests with at most this TTFT", "ms", ttft, True, targets.ttft_ms),
        Chart("Share of requests with at most this TPOT", "ms", tpot, True, targets.tpot_ms),
        Chart("Requests that wait for their first token", "seconds", waiting),
        Chart("Requests that stream tokens", "seconds", running),
        Chart("Slowest TTFT in ms, by arrival", "seconds", late),
    ]


def _shares(values: list[float]) -> list[tuple[float, float]]:
    """The distribution function of the values, at most `_POINTS` points."""
    ordered = sorted(values)
    last = len(ordered) - 1
    places = sorted({round(last * n / _POINTS) for n in range(_POINTS + 1)}) if ordered else []
    return [(ordered[place], (place + 1) / len(ordered)) for place in places]


def in_flight(
    spans: Sequence[tuple[float, float]], num_points: int = _POINTS
) -> list[tuple[float, float]]:
    """The mean number of spans that are under way in each of `num_points` intervals, at its middle.

    A span adds its share of an interval; for the run of intervals that it covers completely, only
    the run's begin and end are noted.
    """
    last = max((end for _, end in spans), default=0.0)
    if last <= 0:
        return []
    width = last / num_points
    partly, changes = [0.0] * (num_points + 1), [0] * (num_points + 2)
    for begin, end in spans:
        first, final = int(begin / width), int(end / width)
        if first == final:
            partly[first] += (end - begin) / width
            continue
        partly[first] += first + 1 - begin / width
        partly[final] += end / width - final
        changes[first + 1] += 1
        changes[final] -= 1
    points, whole = [], 0
    for number in range(num_points):
        whole += changes[number]
        points.append(((number + 0.5) * width, whole + partly[number]))
    return points


def _worst_ttft(requests: list[Request]) -> list[tuple[float, float]]:
    """The largest TTFT among the requests of each of `_POINTS` intervals of arrival."""
    if not requests:
        return []
    last = max(each.arrival for each in requests) or 1.0
    worst: dict[int, float] = {}
    for each in requests:
        place = round(each.arrival / last * _POINTS)
        worst[place] = max(worst.get(place, 0.0), each.ttft_s * 1000)
    return [(last * place / _POINTS, value) for place, value in sorted(worst.items())]
