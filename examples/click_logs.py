"""Synthetic clicks on ads and the purchases that follow, by a law that is known exactly.

    python examples/click_logs.py FOLDER [--rows 1000000]

Writes a table per day for each of two parties: `publisher/` has the features of all clicks,
`advertiser/` the clicks that led to a purchase. `probability` returns the chance of a purchase for
given features, so estimates can be compared with the truth instead of with labels.

Users have one to some twenty clicks, and half of them buy three times as often as the others at
the same features, so the purchases of one user predict each other. Users with many clicks buy less
per click.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

DAYS = tuple(f"2026-05-{day:02}" for day in range(1, 8))
CAMPAIGNS = np.array([f"campaign {number:02}" for number in range(20)])
SITES = np.array([f"site {number:02}" for number in range(30)])
DEVICES = np.array(["desktop", "phone", "tablet"])
MOST = 0.6
"""The largest probability of a purchase for given features."""
FEATURES = ("campaign", "site", "device", "hour", "price", "days_since_visit", "clicks_of_user")

_EFFECTS = np.random.default_rng(2026)
_OF_CAMPAIGNS = _EFFECTS.normal(0.0, 0.6, CAMPAIGNS.size)
_OF_SITES = _EFFECTS.normal(0.0, 0.3, SITES.size)
_OF_DEVICES = np.array([0.3, 0.0, -0.3])


def probability(table: Any) -> np.ndarray:
    """Returns the chance of a purchase (n,) for the features of each click, an Arrow table too."""
    table = {name: np.asarray(table[name]) for name in FEATURES}
    device = np.searchsorted(DEVICES, table["device"])
    evening = np.sin(2.0 * np.pi * (table["hour"] - 14) / 24.0)
    dear = np.log(table["price"] / 40.0)
    returning = np.nan_to_num(np.exp(-table["days_since_visit"] / 7.0))  # 0 for new visitors
    scores = (
        -2.2
        + _OF_CAMPAIGNS[np.searchsorted(CAMPAIGNS, table["campaign"])]
        + _OF_SITES[np.searchsorted(SITES, table["site"])]
        + _OF_DEVICES[device]
        + evening * np.where(device == 0, 0.7, 0.2)
        - dear * np.where(device == 1, 0.9, 0.4)
        + 1.0 * returning
        - 0.1 * np.minimum(table["clicks_of_user"] - 1, 10)
    )
    return MOST / (1.0 + np.exp(-scores))


def clicks(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns the columns of all clicks, in the order of their days, with ``converted`` (n,)."""
    rng = np.random.default_rng(seed)
    # Users have 2.5 clicks on average, and 13 % of the users have more than four.
    counts = rng.geometric(1.0 / 2.5, size=rows)
    counts = counts[: np.searchsorted(np.cumsum(counts), rows) + 1]
    user = rng.permutation(np.repeat(np.arange(counts.size), counts)[:rows])
    shares = 1.0 / np.arange(4, 4 + CAMPAIGNS.size)  # the largest campaign has six times the least
    new = rng.random(rows) < 0.3
    table = {
        "day": np.array(DAYS)[np.sort(rng.integers(len(DAYS), size=rows))],
        "click": np.arange(10**9, 10**9 + rows),
        "user": user,
        "campaign": rng.choice(CAMPAIGNS, size=rows, p=shares / shares.sum()),
        "site": rng.choice(SITES, size=rows),
        "device": rng.choice(DEVICES, size=rows, p=[0.35, 0.55, 0.1]),
        "hour": rng.integers(24, size=rows),
        "price": np.round(np.exp(rng.normal(np.log(40.0), 0.8, rows)), 2) + 0.01,
        "days_since_visit": np.where(new, np.nan, np.round(rng.exponential(10.0, rows))),
        "clicks_of_user": np.bincount(user)[user],
    }
    taste = np.where(rng.random(counts.size) < 0.5, 0.5, 1.5)  # 1 on average, for any features
    table["converted"] = rng.random(rows) < probability(table) * taste[user]
    return table


def write(folder: pathlib.Path, rows: int, seed: int = 0) -> None:
    """Writes the log of the publisher and the purchases of the advertiser, a table per day."""
    table = clicks(rows, seed)
    converted = table.pop("converted")
    for party in ("publisher", "advertiser"):
        (folder / party).mkdir(parents=True, exist_ok=True)
    for day in DAYS:
        today = table["day"] == day
        log = {name: column[today] for name, column in table.items()}
        parquet.write_table(pa.table(log), folder / "publisher" / f"{day}.parquet")
        bought = pa.table({"click": table["click"][today & converted]})
        parquet.write_table(bought, folder / "advertiser" / f"{day}.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--rows", type=int, default=1_000_000, help="the number of clicks")
    arguments = parser.parse_args()
    write(arguments.folder, arguments.rows)


if __name__ == "__main__":
    main()
