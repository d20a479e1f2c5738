"""The report as one HTML page, which loads nothing from elsewhere."""

from __future__ import annotations

import datetime
import html
import io
import math
from collections.abc import Callable, Iterable
from typing import Any

from tf_labeldp.dossier._verify import brief, verdict

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
    "A folder that was set back to an earlier copy is indistinguishable from that copy.",
)
_ELSEWHERE = ("  Assumptions, by who", "    ")
"""Beginnings of a statement's lines with its assumptions, which have a chapter of their own."""
Columns = dict[str, tuple[str, Callable[[dict[str, Any]], Any]]]
_SPREAD: Columns = {
    "epsilon": ("number", lambda row: _shown(row["epsilon"])),
    "examples": ("number", lambda row: f"{row['examples']:,}"),
    "share": ("number", lambda row: f"{row['examples'] / row['of']:.1%}"),
}
_HISTORY: Columns = {
    "when (UTC)": ("when", lambda row: _when(row["time"])),
    "what": ("", lambda row: brief(row["what"]) + (f" ({row['key']})" if row["key"] else "")),
    "examples": ("number", lambda row: f"{row['examples']:,}" if row["examples"] else ""),
    "epsilon": ("number", lambda row: _shown(row["epsilon"])),
    "so far": ("number", lambda row: _shown(row["epsilon_so_far"])),
    "who": ("", lambda row: row["actor"]),
}
_RELEASES: Columns = {
    "receipt": ("", lambda row: row["id"][:12]),
    "what": ("", lambda row: brief(row["what"])),
    "settings": ("", lambda row: row["settings"]),
    "flags": ("", lambda row: ", ".join(row["flags"])),
    "digest": ("digest", lambda row: row["output_digest"] or ""),
}
_PUBLISHED: Columns = {
    "file": ("", lambda row: row["path"]),
    "contains": ("", lambda row: row["contains"]),
    "promise": ("", lambda row: row["headline"]),
    "check": ("", lambda row: verdict(row["problems"])),
    "digest (sha256)": (
        "digest",
        lambda row: "; ".join(f"{name} {digest}" for name, digest in row["sha256"].items()),
    ),
}
_AUDITS: Columns = {"of": ("", lambda row: row["of"]), "found": ("", lambda row: row["found"])}


def page(content: dict[str, Any]) -> str:
    title = "Privacy report: " + ", ".join(entry["folder"] for entry in content["label_sets"])
    headline, *lines = content["statement"]
    sets = "this label set" if len(content["label_sets"]) == 1 else "these label sets"
    skipped = [
        {"of": of, "found": f"not audited: {why}"} for of, why in content["not_audited"].items()
    ]
    audits, published = [*content["audits"], *skipped], content["published"]
    parts = [
        f"<h1>{_text(title)}</h1>",
        f"<p>Made on {_when(content['made_at'])} UTC by {_text(content['made_by'])}.</p>",
        "<div class=promise>",
        f"<b>{_text(headline)}</b><br>for one person, of all releases of {sets}.",
        *(f"<br>{_text(line.strip())}" for line in lines if not line.startswith(_ELSEWHERE)),
        "</div>",
        *_sets(content),
        "<h2>Who must vouch for what</h2>",
        "<p>The promise holds if all of this is true; docs/privacy.md says how each of them can be "
        "checked.</p>",
        *(f"<h3>{_text(who)}</h3>{_list(texts)}" for who, texts in content["assumptions"].items()),
        "" if content["assumptions"] else "<p>Nothing was released.</p>",
        "<h2>Published files</h2>",
        _table(_PUBLISHED, published) if published else _none("was named", "--published FILE"),
        "<h2>Audits</h2>",
        _table(_AUDITS, audits) if audits else _none("was made", "--audit"),
        f"<h2>Versions</h2>{_facts(content['versions'])}",
        f"<h2>Limits of this report</h2>{_list(_LIMITS)}",
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"{body}\n</body>\n</html>\n"
    )


def _none(done: str, option: str) -> str:
    return f"<p>None {done} (<code>{option}</code>).</p>"


def _sets(content: dict[str, Any]) -> list[str]:
    parts = []
    for entry in content["label_sets"]:
        budget = f"epsilon={entry['budget']['epsilon']:g}, delta={entry['budget']['delta']:g}"
        spent = max((float(row["epsilon"]) for row in entry["spread"]), default=0.0)
        facts = {
            "labels": f"{entry['num_labels']:,}: {entry['kind']}",
            "people": entry["people"] or "not declared",
            "budget": budget + (", shared in a project" if entry["in_project"] else ""),
            "spent": f"epsilon={spent:.4g} on the most charged label",
            "left": f"epsilon={entry['remaining']:.4g} for one more use of all labels",
        }
        if gone := entry["forgotten"]:
            facts["forgotten"] = f"{_when(gone['time'])} by {gone['actor']}: draws are erased"
        shares = [{**row, "of": max(1, entry["num_labels"])} for row in entry["spread"]]
        parts += [
            f"<h2>{_text(entry['folder'])}</h2>",
            _facts(facts),
            _odometer(entry, content["made_at"]),
            "<h3>What examples have spent</h3>",
            _table(_SPREAD, shares),
            "<h3>History</h3>",
            _table(_HISTORY, entry["history"]),
            "<details><summary>Settings of noise and sampling, and digests</summary>",
            _table(_RELEASES, _first_of_each(entry["releases"])),
            "</details>",
        ]
    return parts


def _first_of_each(releases: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the releases without repeats of one, such as the epochs of a training."""
    found: dict[Any, dict[str, Any]] = {}
    for release in releases:
        found.setdefault((release["what"], release["settings"], release["output_digest"]), release)
    return list(found.values())


def _odometer(label_set: dict[str, Any], until: str) -> str:
    from matplotlib import dates
    from matplotlib.figure import Figure

    uses = [use for use in label_set["history"] if use["time"]]
    if not uses:
        return ""
    texts = [*(use["time"] for use in uses), until]
    times = [dates.date2num(datetime.datetime.fromisoformat(time)) for time in texts]  # days
    times[-1] = max(times)
    spent = [float(use["epsilon_so_far"]) for use in uses]
    spent.append(spent[-1])
    height = max(
        label_set["budget"]["epsilon"], *(epsilon for epsilon in spent if math.isfinite(epsilon)), 0
    )
    spent = [min(epsilon, 1.2 * height) for epsilon in spent]
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


def _table(columns: Columns, rows: Iterable[dict[str, Any]]) -> str:
    """Returns rows as a table: each column has a head, and the class and the text of its cells."""
    lines = ["".join(f"<th>{_text(head)}</th>" for head in columns)]
    for row in rows:
        cells = []
        for kind, text in columns.values():
            cell = str(text(row))
            kind = "bad" if cell.startswith("WRONG") or "FALSE" in cell else kind
            cells.append(f"<td{f' class={kind}' if kind else ''}>{_text(cell)}</td>")
        lines.append("".join(cells))
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<div class=wide><table>\n{body}\n</table></div>"


def _facts(facts: dict[str, Any]) -> str:
    rows = [
        f"<tr><td>{_text(name)}</td><td>{_text(fact)}</td></tr>" for name, fact in facts.items()
    ]
    return "\n".join(["<div class=wide><table>", *rows, "</table></div>"])


def _list(texts: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{_text(text)}</li>" for text in texts) + "</ul>"


def _when(time: str) -> str:
    return time[:16].replace("T", " ")


def _shown(value: Any) -> str:
    return f"{float(value):.4g}"  # "inf" too


def _text(value: Any) -> str:
    return html.escape(str(value), quote=True)
