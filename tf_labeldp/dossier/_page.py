"""The report as one HTML page, which loads nothing from elsewhere."""

from __future__ import annotations

import datetime
import html
import io
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from tf_labeldp.dossier._verify import brief

_STYLE = """
:root { color-scheme: light dark; --soft: #8884; --bad: #c0392b; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; }
.promise { border: 2px solid; border-radius: .5rem; padding: .8rem 1rem; }
.promise b { font-size: 1.4rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { border-bottom: 1px solid var(--soft); padding: .3rem .6rem; text-align: left;
  vertical-align: top; }
th, td.when { white-space: nowrap; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.digest { font-family: monospace; word-break: break-all; min-width: 16rem; }
.bad { color: var(--bad); font-weight: 600; }
figure { margin: 1rem 0; } svg { max-width: 100%; height: auto; background: white; }
@media print { body { max-width: none; } }
"""
_LIMITS = (
    "Vaults without a store, stores that were removed, and uses of the labels past this library "
    "are not in it.",
    "It covers labels alone: the features count as public.",
    "An audit can refute a claim; it can't show that one is true.",
    "A folder that was set back to an earlier copy can't be told from that copy.",
)


def page(content: dict[str, Any]) -> str:
    """Returns the page of the content of a report."""
    stated = content["guarantee"]
    title = "Privacy report: " + ", ".join(one["folder"] for one in content["label_sets"])
    parts = [
        f"<h1>{_text(title)}</h1>",
        f"<p>Made on {_when(content['made_at'])} UTC by {_text(content['made_by'])}.</p>",
        "<div class=promise>",
        f"<b>{_text(content['statement'][0])}</b>",
        "<br>for one person, of all that left "
        f"{'this label set' if len(content['label_sets']) == 1 else 'these label sets'}.",
        "".join(
            f"<br>{_text(line.strip())}"
            for line in itertools.takewhile(
                lambda line: "Assumptions" not in line, content["statement"][1:]
            )
        ),
        "</div>",
        *_sets(content),
        "<h2>Who must vouch for what</h2>",
        "<p>The promise holds if all of this is true; docs/privacy.md says how each of them can be "
        "checked.</p>",
    ]
    for who, texts in content["assumptions"].items():
        parts += [f"<h3>{_text(who)}</h3>", _list(texts)]
    if not content["assumptions"] and not stated["epsilon"]:
        parts.append("<p>Nothing has left.</p>")
    parts += _published(content["published"])
    parts += _audits(content["audits"], content["not_audited"])
    parts += ["<h2>Versions</h2>", _table(("", ""), content["versions"].items())]
    parts += ["<h2>What this report can't know</h2>", _list(_LIMITS)]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"{body}\n</body>\n</html>\n"
    )


def _sets(content: dict[str, Any]) -> list[str]:
    parts = []
    for one in content["label_sets"]:
        budget = f"epsilon={one['budget']['epsilon']:g}, delta={one['budget']['delta']:g}"
        spent = max((float(row["epsilon"]) for row in one["spread"]), default=0.0)
        facts = [
            ("labels", f"{one['num_labels']:,}: {one['kind']}"),
            ("people", one["people"] or "not declared"),
            ("budget", budget + (", shared in a project" if one["in_project"] else "")),
            ("spent", f"epsilon={spent:.4g} on the most charged label"),
            ("left", f"epsilon={one['remaining']:.4g} for one more use of all labels"),
        ]
        if one["forgotten"]:
            gone = one["forgotten"]
            facts.append(
                ("forgotten", f"{_when(gone['time'])} by {gone['actor']}: draws are erased")
            )
        parts += [
            f"<h2>{_text(one['folder'])}</h2>",
            _table(("", ""), facts),
            _odometer(one, content["made_at"]),
            "<h3>What examples have spent</h3>",
            _table(
                ("epsilon", "examples", "share"),
                [
                    (
                        _shown(row["epsilon"]),
                        f"{row['examples']:,}",
                        f"{row['examples'] / max(1, one['num_labels']):.1%}",
                    )
                    for row in one["spread"]
                ],
                numbers=(0, 1, 2),
            ),
            "<h3>History</h3>",
            _table(
                ("when (UTC)", "what", "examples", "epsilon", "so far", "who"),
                [
                    (
                        _when(row["time"]),
                        brief(row["what"]) + (f" ({row['key']})" if row["key"] else ""),
                        f"{row['examples']:,}" if row["examples"] else "",
                        _shown(row["epsilon"]),
                        _shown(row["epsilon_so_far"]),
                        row["actor"],
                    )
                    for row in one["history"]
                ],
                numbers=(2, 3, 4),
            ),
            "<details><summary>Settings of noise and sampling, and digests</summary>",
            _table(
                ("receipt", "what", "settings", "flags", "digest"),
                [
                    (
                        row["id"][:12],
                        brief(row["what"]),
                        row["settings"],
                        ", ".join(row["flags"]),
                        row["output_digest"] or "",
                    )
                    for row in _first_of_each(one["releases"])
                ],
            ),
            "</details>",
        ]
    return parts


def _first_of_each(releases: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the releases without those that only repeat one, such as the epochs of a training."""
    found: dict[Any, dict[str, Any]] = {}
    for one in releases:
        found.setdefault((one["what"], one["settings"], one["output_digest"]), one)
    return list(found.values())


def _published(files: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        (
            one["path"],
            one["contains"],
            one["headline"],
            "WRONG: " + "; ".join(one["problems"]) if one["problems"] else "keeps to its statement",
            "; ".join(f"{name} {digest}" for name, digest in one["sha256"].items()),
        )
        for one in files
    ]
    heads = ("file", "contains", "promise", "check", "digest (sha256)")
    none = "<p>None was named (<code>--published FILE</code>).</p>"
    return ["<h2>Published files</h2>", _table(heads, rows) if rows else none]


def _audits(audits: Sequence[dict[str, Any]], skipped: dict[str, str]) -> list[str]:
    rows = [(one["of"], one["found"]) for one in audits]
    rows += [(name, f"not audited: {why}") for name, why in skipped.items()]
    none = "<p>None was made (<code>--audit</code>).</p>"
    return ["<h2>Audits</h2>", _table(("of", "found"), rows) if rows else none]


def _odometer(label_set: dict[str, Any], until: str) -> str:
    """Returns a plot of what was spent over time, with the budget, as SVG."""
    from matplotlib import dates
    from matplotlib.figure import Figure

    uses = [one for one in label_set["history"] if one["time"]]
    if not uses:
        return ""
    texts = [*(one["time"] for one in uses), until]
    times = [dates.date2num(datetime.datetime.fromisoformat(one)) for one in texts]  # days
    times[-1] = max(times)
    spent = [float(one["epsilon_so_far"]) for one in uses]
    spent.append(spent[-1])
    height = max(label_set["budget"]["epsilon"], *(one for one in spent if math.isfinite(one)), 0)
    spent = [min(one, 1.2 * height) for one in spent]
    figure = Figure(figsize=(8.0, 2.6), layout="constrained")
    axes = figure.subplots()
    axes.step([times[0], *times], [0.0, *spent], where="post", color="#1f77b4")
    axes.plot(times[:-1], spent[:-1], "o", color="#1f77b4")
    margin = max(1e-3, (times[-1] - times[0]) / 30)
    axes.set_xlim(times[0] - margin, times[-1] + margin)
    axes.axhline(label_set["budget"]["epsilon"], color="#c0392b", linestyle="--")
    axes.annotate(
        "budget now",
        (0.01, label_set["budget"]["epsilon"]),
        xycoords=("axes fraction", "data"),
        va="bottom",
        color="#c0392b",
    )
    axes.set_ylim(0.0, 1.2 * height)
    axes.set_ylabel("epsilon so far")
    locator = dates.AutoDateLocator()
    axes.xaxis_date()
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))
    axes.spines[["top", "right"]].set_visible(False)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    words = f"Epsilon spent over time: {spent[-1]:.4g} of {label_set['budget']['epsilon']:g}"
    return f'<figure role="img" aria-label="{_text(words)}">{svg}</figure>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Sequence[int] = ()) -> str:
    lines = ["<div class=wide><table>"]
    if any(heads):
        lines.append("<tr>" + "".join(f"<th>{_text(head)}</th>" for head in heads) + "</tr>")
    for row in rows:
        cells = []
        for place, cell in enumerate(row):
            kind = " class=number" if place in numbers else ""
            for word in ("when", "digest"):
                kind = f" class={word}" if heads[place].startswith(word) else kind
            kind = " class=bad" if str(cell).startswith("WRONG") or "FALSE" in str(cell) else kind
            cells.append(f"<td{kind}>{_text(cell)}</td>")
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return "\n".join([*lines, "</table></div>"])


def _list(texts: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{_text(one)}</li>" for one in texts) + "</ul>"


def _when(time: str) -> str:
    return time[:16].replace("T", " ")


def _shown(value: Any) -> str:
    return f"{float(value):.4g}"  # "inf" too


def _text(value: Any) -> str:
    return html.escape(str(value), quote=True)
