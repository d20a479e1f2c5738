"""The report as one HTML page without external files."""

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
  vertical-align: top; white-space: pre-line; }
th, td.when { white-space: nowrap; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.digest { font-family: monospace; word-break: break-all; min-width: 16rem; }
.bad { color: var(--bad); font-weight: 600; }
figure { margin: 1rem 0; } svg { max-width: 100%; height: auto; background: white; }
@media print { body { max-width: none; } }
"""
_LIMITS = (
    "The report leaves out vaults without a store, removed stores, and uses of the labels outside "
    "this library.",
    "It covers labels alone: the features are assumed public.",
    "An audit can refute a claim but can't prove it.",
    "A store that was restored from an earlier copy is indistinguishable from that copy.",
)
_ASSUMPTIONS = "  Assumptions, by who"
"""Beginning of the line above a statement's assumptions."""
Columns = dict[str, tuple[str, Callable[[dict[str, Any]], Any]]]
_SPREAD: Columns = {
    "epsilon": ("number", lambda row: _shown(row["epsilon"])),
    "examples": ("number", lambda row: f"{row['examples']:,}"),
    "share": ("number", lambda row: f"{row['examples'] / row['of']:.1%}"),
}
_HISTORY: Columns = {
    "when (UTC)": ("when", lambda row: _when(row["time"])),
    "use": ("", lambda row: brief(row["what"]) + (f" ({row['key']})" if row["key"] else "")),
    "examples": ("number", lambda row: f"{row['examples']:,}" if row["examples"] else ""),
    "epsilon": ("number", lambda row: _shown(row["epsilon"])),
    "so far": ("number", lambda row: _shown(row["epsilon_so_far"])),
    "user": ("", lambda row: row["actor"]),
}
_RELEASES: Columns = {
    "receipt": ("", lambda row: row["id"][:12]),
    "use": ("", lambda row: brief(row["what"])),
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
_AUDITS: Columns = {
    "audited": ("", lambda row: row["of"]),
    "result": ("", lambda row: row["found"]),
}


def page(content: dict[str, Any]) -> str:
    title = "Privacy report: " + ", ".join(entry["folder"] for entry in content["label_sets"])
    headline, *lines = content["statement"]
    # Assumptions are indented below the name of the party, and get their own chapter.
    promise = [line for line in lines if not line.startswith("    ")]
    notes = [line for line in lines if line.startswith("    ")]
    sets = "this label set" if len(content["label_sets"]) == 1 else "these label sets"
    skipped = [
        {"of": name, "found": f"not audited: {reason}"}
        for name, reason in content["not_audited"].items()
    ]
    audits, published = [*content["audits"], *skipped], content["published"]
    parts = [
        f"<h1>{_text(title)}</h1>",
        f"<p>Made on {_when(content['made_at'])} UTC by {_text(content['made_by'])}.</p>",
        "<div class=promise>",
        f"<b>{_text(headline)}</b><br>for one person, over all releases of {sets}.",
        *(f"<br>{_text(line.strip())}" for line in promise if not line.startswith(_ASSUMPTIONS)),
        "</div>",
        *_sets(content),
        "<h2>Who must vouch for what</h2>",
        "<p>The promise needs all of these. For each code, "
        "docs/privacy.md#who-must-vouch-for-what explains how to check it.</p>"
        if notes
        else "<p>Nothing was released.</p>",
        *map(_assumption, notes),
        "<h2>Published files</h2>",
        _table(_PUBLISHED, published) if published else _none("named", "--published FILE"),
        "<h2>Audits</h2>",
        _table(_AUDITS, audits) if audits else _none("made", "--audit"),
        f"<h2>Versions</h2>{_facts(content['versions'])}",
        f"<h2>Limits of this report</h2><ul>{''.join(f'<li>{text}</li>' for text in _LIMITS)}</ul>",
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"{body}\n</body>\n</html>\n"
    )


def _assumption(line: str) -> str:
    if not line.startswith("      ["):
        return f"<h3>{_text(line.strip().removesuffix(':'))}</h3>"
    code, text = line.strip().split(" ", maxsplit=1)
    return f"<p><code>{_text(code)}</code> {_text(text)}</p>"


def _none(done: str, option: str) -> str:
    return f"<p>None was {done} (<code>{option}</code>).</p>"


def _sets(content: dict[str, Any]) -> list[str]:
    parts = []
    for entry in content["label_sets"]:
        budget = f"epsilon={entry['budget']['epsilon']:g}, delta={entry['budget']['delta']:g}"
        spent = max((float(row["epsilon"]) for row in entry["spread"]), default=0.0)
        facts = {
            "labels": f"{entry['num_labels']:,}: {entry['kind']}",
            "people": entry["people"] or "not declared",
            "budget": budget + (", shared in a project" if entry["in_project"] else ""),
            "spent": f"epsilon={spent:.4g} by the most charged label",
            "left": f"epsilon={entry['remaining']:.4g} for another use of all labels",
        }
        if gone := entry["forgotten"]:
            facts["forgotten"] = f"{_when(gone['time'])} by {gone['actor']}: draws were erased"
        shares = [{**row, "of": max(1, entry["num_labels"])} for row in entry["spread"]]
        parts += [
            f"<h2>{_text(entry['folder'])}</h2>",
            _facts(facts),
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
    from matplotlib.dates import ConciseDateFormatter
    from matplotlib.figure import Figure

    uses = [use for use in label_set["history"] if use["time"]]
    if not uses:
        return ""
    texts = [*(use["time"] for use in uses), until]
    times: list[Any] = [datetime.datetime.fromisoformat(time) for time in texts]
    times[-1] = max(times)
    spent = [float(use["epsilon_so_far"]) for use in uses]
    spent.append(spent[-1])
    budget = label_set["budget"]["epsilon"]
    words = f"Epsilon spent over time: {spent[-1]:.4g} of {budget:g}"
    height = 1.2 * max(budget, *(epsilon for epsilon in spent if math.isfinite(epsilon)), 0)
    spent = [min(epsilon, height) for epsilon in spent]
    figure = Figure(figsize=(8.0, 2.6), layout="constrained")
    axes = figure.subplots()
    axes.step([times[0], *times], [0.0, *spent], where="post", color="#1f77b4")
    axes.plot(times[:-1], spent[:-1], "o", color="#1f77b4")
    axes.axhline(budget, color="#c0392b", linestyle="--")
    corner = axes.get_yaxis_transform()
    axes.text(0.01, budget, "budget now", color="#c0392b", transform=corner, va="bottom")
    axes.set_ylim(0.0, height)
    axes.set_ylabel("epsilon so far")
    locator = axes.xaxis.get_major_locator()
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.spines[["top", "right"]].set_visible(False)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue().partition("<svg")[2]
    return f'<figure role="img" aria-label="{_text(words)}"><svg{svg}</figure>'


def _table(columns: Columns, rows: Iterable[dict[str, Any]]) -> str:
    """Returns a table; a column has a head, the CSS class of its cells, and their text."""
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


def _when(time: str) -> str:
    return time[:16].replace("T", " ")


def _shown(value: Any) -> str:
    # JSON holds infinity as the text "inf".
    return f"{float(value):.4g}"


def _text(value: Any) -> str:
    return html.escape(str(value), quote=True)
