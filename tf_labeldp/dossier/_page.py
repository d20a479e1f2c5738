"""The report as one HTML page without external files."""

from __future__ import annotations

import datetime
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tf_labeldp._validate import counted
from tf_labeldp.accounting import Assumption, PrivacyGuarantee
from tf_labeldp.dossier._checks import HOW_TO_CHECK
from tf_labeldp.dossier._files import brief
from tf_labeldp.dossier._texts import for_html
from tf_labeldp.dossier._verify import verdict
from tf_labeldp.mechanisms import Mechanism

_STYLE = """
:root { color-scheme: light dark; --soft: #8884; --bad: #c0392b; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem;
  overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; }
.promise { border: 2px solid; border-radius: .5rem; padding: .8rem 1rem; }
.promise b { font-size: 1.4rem; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { border-bottom: 1px solid var(--soft); padding: .3rem .6rem; text-align: left;
  vertical-align: top; white-space: pre-line; overflow-wrap: normal; }
th, td.when { white-space: nowrap; }
th.number, td.number { text-align: right; white-space: nowrap; }
td.number { font-variant-numeric: tabular-nums; }
td.digest { font-family: monospace; overflow-wrap: anywhere; min-width: 16rem; }
td.words { overflow-wrap: anywhere; min-width: 10rem; }
summary { margin: .8rem 0; }
.bad { color: var(--bad); font-weight: 600; }
dt { margin-top: .8rem; } dd { margin: .1rem 0 0 1rem; font-size: .9rem; }
figure { margin: 1rem 0; } svg { max-width: 100%; height: auto; } svg.narrow { display: none; }
@media (prefers-color-scheme: dark) {
  :root { --bad: #ff8a7a; }
  svg { filter: invert(1) hue-rotate(180deg); }
}
@media (max-width: 45rem) {
  /* Each row is a list of its cells, below one another, each with its head. */
  table.rows, table.rows tbody, table.rows tr, table.rows td { display: block; }
  table.rows tr:first-child, table.rows td:empty { display: none; }
  table.rows tr { border-bottom: 2px solid var(--soft); padding: .4rem 0; }
  table.rows td { border: 0; padding: .1rem 0; text-align: left; white-space: pre-line;
    overflow-wrap: anywhere; min-width: 0; }
  table.rows td::before { content: attr(data-head) ": "; opacity: .75; }
  .promise b { font-size: 1.15rem; }
  svg.wide { display: none; } svg.narrow { display: block; }
}
@media print { body { max-width: none; } }
"""
_ALLOWED = "default-src 'none'; style-src 'unsafe-inline'"
"""A page has no script, and loads nothing. All texts are escaped: this is a second wall."""
_LIMITS = (
    "The report leaves out vaults without a store, removed stores, and uses of the labels outside "
    "this library.",
    "It covers labels alone: the features are assumed public.",
    "An audit can refute a claim but can't prove it.",
    "A store that was restored from an earlier copy is indistinguishable from that copy.",
)
_PLOTS = {"wide": (8.0, 2.8), "narrow": (3.7, 2.8)}
"""Inches of the plot on a screen, and on a phone, where a wide plot would shrink its text."""
_FONT_POINTS = 12.0
_OF_PROMISE = (
    "The promises of several files do not stand alone: publishing all of them costs up to the "
    "promise at the top of this page."
)
_OF_BUDGETS = (
    "Epsilons of the same examples compose to their sum or less, and uses of different examples do "
    "not add: the spent epsilon is that of the most charged example."
)
_OF_AUDITS = (
    "A correct mechanism fails an audit with a probability of at most 1 minus its confidence: one "
    "in a million for --audit. Repeat an audit that ends with FALSE: a claim that fails twice is "
    "false, or covers something else than the audit."
)
Columns = dict[str, tuple[str, Callable[[dict[str, Any]], Any]]]
"""The columns of a table by their heads: the CSS class of the cells, and their text."""
_SPREAD: Columns = {
    "epsilon": ("number", lambda row: _shown(row["epsilon"])),
    "examples": ("number", lambda row: f"{row['examples']:,}"),
    "share": ("number", lambda row: f"{row['examples'] / row['of']:.1%}"),
}
_HISTORY: Columns = {
    "when (UTC)": ("when", lambda row: _when(row["time"])),
    "use": ("words", lambda row: brief(row["in_words"]) + f" ({row['key']})" * bool(row["key"])),
    "examples": ("number", lambda row: f"{row['examples']:,}" if row["examples"] else ""),
    "epsilon": ("number", lambda row: _shown(row["epsilon"])),
    "so far": ("number", lambda row: _shown(row["epsilon_so_far"])),
    "user": ("", lambda row: row["actor"]),
}
_RELEASES: Columns = {
    "receipt": ("", lambda row: row["id"][:12]),
    "use": ("words", lambda row: Mechanism.without_unset(row["what"])),
    "settings": ("words", lambda row: row["settings"]),
    "flags": ("", lambda row: ", ".join(row["flags"])),
    "digest": ("digest", lambda row: row["output_digest"] or ""),
}
_PUBLISHED: Columns = {
    "file": ("", lambda row: row["path"]),
    "contains": ("words", lambda row: row["contains"]),
    "promise": ("words", lambda row: [row["headline"], *_remarks(row)]),
    "check": ("words", lambda row: verdict(row["problems"], row["not_checked"])),
    "digest (sha256)": (
        "digest",
        lambda row: [f"{name} {digest}" for name, digest in row["sha256"].items()],
    ),
}
_AUDITS: Columns = {
    "audited": ("", lambda row: row["of"]),
    "result": ("", lambda row: row["found"].splitlines()),
}
_BAD = {"check": ("problems", "not_checked"), "result": ("refutes",)}
"""Columns whose cells are marked in rows that have one of these."""


def page(content: dict[str, Any]) -> str:
    title = "Privacy report: " + ", ".join(entry["folder"] for entry in content["label_sets"])
    # Assumptions get their own chapter.
    promise = _read(content["guarantee"])
    lines = [*promise.sentences(in_full=True), *(f"remark: {text}" for text in promise.remarks)]
    vouched = _who_vouches(content)
    sets = "this label set" if len(content["label_sets"]) == 1 else "these label sets"
    skipped = [
        {"of": name, "found": f"not audited: {reason}"}
        for name, reason in content["not_audited"].items()
    ]
    made = f"Made on {_when(content['made_at'])} UTC by {content['made_by']}"
    audits, published = [*content["audits"], *skipped], content["published"]
    parts = [
        f"<h1>{for_html(title)}</h1>",
        f"<p>{for_html(made)}.</p>",
        "<div class=promise>",
        f"<b>{for_html(promise.headline)}</b><br>for one person, over all releases of {sets}.",
        *(f"<br>{for_html(line)}" for line in lines),
        "</div>",
        *_sets(content),
        "<h2>Who must vouch for what</h2>",
        *(vouched or ["<p>Nothing was released.</p>"]),
        "<h2>Published files</h2>",
        *_noted(_OF_PROMISE, _PUBLISHED, published, _none("named", "--published FILE")),
        "<h2>Audits</h2>",
        *_noted(_OF_AUDITS, _AUDITS, audits, _none("made", "--audit")),
        f"<h2>Versions</h2>{_facts(content['versions'])}",
        f"<h2>Limits of this report</h2><ul>{''.join(f'<li>{text}</li>' for text in _LIMITS)}</ul>",
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_ALLOWED}">\n'
        f"<title>{for_html(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"{body}\n</body>\n</html>\n"
    )


def _who_vouches(content: dict[str, Any]) -> list[str]:
    """Returns all assumptions of the promise and of the published files, by party."""
    promise = _read(content["guarantee"])
    needed: dict[tuple[str, str], list[str]] = {}
    stated = [("the promise above", promise)]
    stated += [(f["path"], _read(f["guarantee"])) for f in content["published"] if f["guarantee"]]
    for name, guarantee in stated:
        for note in guarantee.assumptions:
            needed.setdefault((note.code, str(note)), []).append(name)
    everything = promise.with_assumptions([n for _, each in stated for n in each.assumptions])
    parts = []
    for title, notes in everything.assumptions_by_voucher().items():
        parts += [f"<h3>{for_html(title)}</h3>", "<dl>"]
        for note in notes:
            names = needed[note.code, str(note)] if len(stated) > 1 else []
            parts += _assumption(note, names)
        parts.append("</dl>")
    if not parts:
        return []
    files = "The promise, or the file that is named, needs each of these."
    intro = files if len(stated) > 1 else "The promise needs all of these."
    return [f"<p>{intro} Codes are those of docs/privacy.md#who-must-vouch-for-what.</p>", *parts]


def _assumption(note: Assumption, names: Sequence[str]) -> list[str]:
    lines = [f"<dt><code>[{for_html(note.code)}]</code> {for_html(note)}</dt>"]
    how = HOW_TO_CHECK.get(note.code, HOW_TO_CHECK["other"])
    lines.append(f"<dd>To check: {for_html(how)}</dd>")
    if names:
        lines.append(f"<dd>For: {for_html(', '.join(names))}</dd>")
    return lines


def _read(guarantee: dict[str, Any]) -> PrivacyGuarantee:
    return PrivacyGuarantee.from_json(json.dumps(guarantee))


def _remarks(file: dict[str, Any]) -> Sequence[str]:
    return file["guarantee"]["remarks"] if file["guarantee"] else ()


def _none(done: str, option: str) -> str:
    return f"<p>None was {done} (<code>{option}</code>).</p>"


def _noted(note: str, columns: Columns, rows: Sequence[dict[str, Any]], none: str) -> list[str]:
    return [f"<p>{note}</p>", _table(columns, rows)] if rows else [none]


def _sets(content: dict[str, Any]) -> list[str]:
    parts = []
    for entry in content["label_sets"]:
        budget = f"epsilon={entry['budget']['epsilon']:g}, delta={entry['budget']['delta']:g}"
        spent = max((float(row["epsilon"]) for row in entry["spread"]), default=0.0)
        facts = {
            "labels": f"{entry['num_labels']:,}: {entry['kind']}",
            "people": entry["people"]
            or "not declared (people=): those of other label sets may be the same, so epsilons add",
            "budget": budget + (", shared in a project" if entry["in_project"] else ""),
            "spent": f"epsilon={spent:.4g} by the most charged label",
            "left": f"epsilon={entry['remaining']:.4g} for another use of all labels",
        }
        if gone := entry["forgotten"]:
            facts["forgotten"] = f"{_when(gone['time'])} by {gone['actor']}: draws were erased"
        shares = [{**row, "of": max(1, entry["num_labels"])} for row in entry["spread"]]
        parts += [
            f"<h2>{for_html(entry['folder'])}</h2>",
            _facts(facts),
            f"<p>{_OF_BUDGETS}</p>",
            _odometer(entry, content["made_at"]),
            "<h3>Epsilon spent by example</h3>",
            _table(_SPREAD, shares),
            "<h3>History</h3>",
            _table(_HISTORY, entry["history"]),
            "<details><summary>Settings of noise and sampling, and digests</summary>",
            _table(_RELEASES, _distinct(entry["releases"])),
            "</details>",
        ]
    return parts


def _distinct(releases: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns releases without repeats, such as the epochs of one training."""
    first: dict[Any, dict[str, Any]] = {}
    for release in releases:
        first.setdefault((release["what"], release["settings"], release["output_digest"]), release)
    return list(first.values())


def _odometer(label_set: dict[str, Any], until: str) -> str:
    uses = [use for use in label_set["history"] if use["time"]]
    releases = [use for use in uses if float(use["epsilon"])]
    budget = label_set["budget"]["epsilon"]
    days = sorted(use["time"][:10] for use in releases)
    if days and days[0] != days[-1]:
        words = f"Epsilon spent over time: {_shown(uses[-1]['epsilon_so_far'])} of {budget:g}"
        svgs = [_plot(uses, until, budget, name) for name in _PLOTS]
        return f'<figure role="img" aria-label="{for_html(words)}">{"".join(svgs)}</figure>'
    if not releases:
        return ""
    when = f"{_when(releases[0]['time'])} UTC" if len(releases) == 1 else days[0]
    spent = f"epsilon={_shown(uses[-1]['epsilon_so_far'])} of a budget of {budget:g}"
    text = f"{counted(len(releases), 'use')}, on {when}, spent {spent}."
    return f"<p>{for_html(text)}</p>"


def _plot(uses: Sequence[dict[str, Any]], until: str, budget: float, name: str) -> str:
    """Returns the SVG of epsilon over time, with a width by ``name``."""
    import matplotlib
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.figure import Figure

    texts = [*(use["time"] for use in uses), until]
    times: list[Any] = [datetime.datetime.fromisoformat(time) for time in texts]
    times[-1] = max(times)
    spent = [float(use["epsilon_so_far"]) for use in uses]
    spent.append(spent[-1])
    height = 1.25 * max(budget, *(epsilon for epsilon in spent if math.isfinite(epsilon)), 0)
    spent = [min(epsilon, height) for epsilon in spent]
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": _FONT_POINTS}):
        figure = Figure(figsize=_PLOTS[name], layout="constrained")
        axes = figure.subplots()
        axes.step([times[0], *times], [0.0, *spent], where="post", color="#1f77b4")
        axes.plot(times[:-1], spent[:-1], "o", color="#1f77b4")
        axes.axhline(budget, color="#c0392b", linestyle="--")
        axes.annotate(
            "budget now",
            (0.99, budget),
            (0, 6),  # points, above a use that spends all of it
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            color="#c0392b",
            ha="right",
        )
        axes.set_ylim(0.0, height)
        axes.set_ylabel("epsilon so far")
        locator = AutoDateLocator(minticks=2, maxticks=int(2 * _PLOTS[name][0]) - 3)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
        for tick_labels in (axes.xaxis, axes.yaxis):
            tick_labels.get_offset_text().set_fontsize(_FONT_POINTS)
        axes.tick_params(labelsize=_FONT_POINTS)
        axes.spines[["top", "right"]].set_visible(False)
        nothing = {"Date": None, "Creator": None}
        figure.savefig(buffer, format="svg", metadata=nothing, transparent=True)
    # Two plots of one page would share the names of their groups.
    svg = re.sub(r'<g id="\w+">', "<g>", buffer.getvalue().partition("<svg")[2])
    return f'<svg class="{name}"{svg}'


def _table(columns: Columns, rows: Iterable[dict[str, Any]]) -> str:
    """Returns a table, in which the cells with what is wrong in their row are marked."""
    heads = [
        f"<th{' class=number' if kind == 'number' else ''}>{for_html(head)}</th>"
        for head, (kind, _) in columns.items()
    ]
    all_rows = ["".join(heads)]
    for row in rows:
        cells = []
        for head, (kind, text) in columns.items():
            content = text(row)
            cell = for_html(*(content if isinstance(content, list) else [content]))
            is_bad = head in _BAD and any(row.get(name) for name in _BAD[head])
            kind = f"{kind} bad".strip() if is_bad else kind
            named = f' data-head="{for_html(head)}"'
            named += f' class="{kind}"' if kind else ""
            cells.append(f"<td{named}>{cell}</td>")
        all_rows.append("".join(cells))
    body = "\n".join(f"<tr>{row}</tr>" for row in all_rows)
    return f"<table class=rows>\n{body}\n</table>"


def _facts(facts: dict[str, Any]) -> str:
    rows = [
        f"<tr><td>{for_html(name)}</td><td>{for_html(fact)}</td></tr>"
        for name, fact in facts.items()
    ]
    return "\n".join(["<table>", *rows, "</table>"])


def _when(time: str) -> str:
    return time[:16].replace("T", " ")


def _shown(value: Any) -> str:
    # JSON holds infinity as the text "inf".
    return f"{float(value):.4g}"
