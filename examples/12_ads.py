"""Ads: clicks at the publisher, purchases at the advertiser, users with several clicks.

    python examples/12_ads.py [all FOLDER] [--rows 1000000]

The steps are `prepare` (writes the tables of both parties), `ask` (the publisher chooses the clicks
that get a label), `advertiser` (sends noisy labels, a folder per day), `publisher` (trains, and
checks calibration and totals) and `report` (the advertiser's report to sign). Name one in place of
`all` to run it alone. Each has its own process, and the parties share `request` and `message`.

The clicks are synthetic (`click_logs.py`), so the chance of a purchase is known: calibration and
totals are compared with this law. To copy this, replace `prepare` by your tables, and leave out
what uses `probability`.

The unit of privacy is a user: all labels of one user together have epsilon 4. So the publisher asks
for at most four clicks of each user, on different days and chosen without labels, and each of these
has epsilon 1.
"""

import argparse
import json
import pathlib
import subprocess
import sys

import numpy as np
import pyarrow as pa
from click_logs import CAMPAIGNS, DAYS, FEATURES, probability, write
from pyarrow import compute, parquet

EPSILON = 4.0  # of all labels of one user
MOST_CLICKS = 4  # of one user that get a label, each on another day
EPSILON_OF_COUNTS = 0.1  # of a click in the counts by campaign; its noisy label gets the rest
SIZES = 5  # groups of users by their clicks: one to four, or more
TEXTS = ["campaign", "site", "device"]


def ask(folder: pathlib.Path) -> None:
    """Publisher: writes the clicks that get a label, one of a user and day, a table per day."""
    log = parquet.read_table(folder / "publisher")
    user, day = log["user"].to_numpy(), np.searchsorted(DAYS, np.asarray(log["day"]))
    # A random click of each user and day, and of these four of each user: no label is used.
    order = np.random.default_rng(0).permutation(user.size)
    _, first = np.unique(len(DAYS) * user[order] + day[order], return_index=True)
    order = order[np.sort(first)]
    order = order[np.argsort(user[order], kind="stable")]
    place = np.arange(order.size) - np.searchsorted(user[order], user[order])
    asked = np.zeros(user.size, dtype=bool)
    asked[order[place < MOST_CLICKS]] = True

    request = log.select(["click", "day", "user"]).append_column("group", pa.array(groups(log)))
    request = request.filter(asked)
    (folder / "request").mkdir(exist_ok=True)
    for day in DAYS:
        today = request.filter(compute.equal(request["day"], day))
        parquet.write_table(today, folder / "request" / f"{day}.parquet")
    print(f"publisher: asks for the labels of {len(request):,} of {len(log):,} clicks")


def groups(log: pa.Table) -> np.ndarray:
    """Returns the group of each click: its campaign, and its user's clicks, one to five or more.

    Users with many clicks buy less per click, and only a part of their clicks gets a label. So
    counts of labelled clicks are scaled to all clicks within a group.
    """
    campaign = np.searchsorted(CAMPAIGNS, np.asarray(log["campaign"]))
    return SIZES * campaign + np.minimum(log["clicks_of_user"].to_numpy(), SIZES) - 1


def advertiser(folder: pathlib.Path) -> None:
    """Advertiser: sends a noisy label for each click of the request, and noisy counts by group."""
    # This party trains nothing, so it needs no TensorFlow.
    import tf_labeldp as ldp

    message = folder / "message"
    request = parquet.read_table(folder / "request")
    bought = parquet.read_table(sorted((folder / "advertiser").glob("*.parquet")))
    converted = np.isin(request["click"].to_numpy(), bought["click"].to_numpy())

    # The budget is for all labels of one user. Keyed draws are functions of a secret key, the id
    # and the label, so that a day which is drawn again, here or elsewhere, has the same labels.
    labels = ldp.PrivateLabels(
        converted,
        ldp.vault.Classes([False, True]),
        budget=ldp.PrivacyBudget(EPSILON),
        users=request["user"],
        store=folder / "advertiser" / "label-store",
        draws=ldp.vault.Keyed(request["click"]),
    )
    # Each day has its own draw and file, and a user is charged for each day on which she has one.
    # The last day is kept for a check of the models.
    epsilon = EPSILON / MOST_CLICKS - EPSILON_OF_COUNTS
    mechanism = ldp.RandomizedResponse(epsilon, num_classes=2)
    for day in DAYS:
        rows = np.flatnonzero(np.asarray(request["day"]) == day)
        noisy = labels.randomize(mechanism, indices=rows, key=day)
        place = message / ("check" if day == DAYS[-1] else "train") / day
        if not place.exists():
            noisy.save(place)

    # Counts of one release have far less noise than sums of noisy labels.
    histogram = ldp.mechanisms.HistogramMechanism(EPSILON_OF_COUNTS, num_classes=2)
    counts = labels.release(histogram, public_input=request["group"].to_numpy(), key="campaigns")
    content = {
        "counts": counts.values.tolist(),
        "noise": histogram.noise_stddev,
        "statement": str(counts.guarantee()).splitlines(),
    }
    (message / "counts.json").write_text(json.dumps(content, indent=1))
    print(labels.history())
    (message / "privacy.json").write_text(labels.guarantee().to_json())
    print(labels.guarantee())


def publisher(folder: pathlib.Path) -> None:
    """Publisher: trains two models on the noisy labels, and checks calibration and totals."""
    import tf_labeldp as ldp

    ldp.cli.load_tensorflow()  # without the lines of its log

    import keras

    # Row i of the request, and so of the asked clicks, is example i of the noisy labels.
    log = parquet.read_table(folder / "publisher", read_dictionary=TEXTS)
    request = parquet.read_table(folder / "request")
    asked = log.filter(np.isin(log["click"].to_numpy(), request["click"].to_numpy()))
    features = asked.select(FEATURES)
    train = ldp.NoisyLabels.load(folder / "message" / "train")
    check = ldp.NoisyLabels.load(folder / "message" / "check")

    # Boosted trees. Training costs nothing more, however often it reads the noisy labels.
    trees = ldp.PrivateBoosting().fit(features, train)

    # Any Keras network. The loss sends its predictions through the channel of the noisy labels, so
    # that they are chances of the true ones.
    codes = ldp.features.TableCodes().fit(features)
    is_text = codes.categorical_
    numbers = codes.transform(features)[:, ~is_text]
    center, width = np.nanmean(numbers, axis=0), np.nanstd(numbers, axis=0)

    def inputs_of(table: pa.Table) -> np.ndarray:
        """Returns codes from 1 on, scaled numbers with 0 if missing, and which are missing."""
        rows = codes.transform(table)
        numbers = (rows[:, ~is_text] - center) / width
        return np.nan_to_num(np.hstack([rows[:, is_text] + 1.0, numbers, np.isnan(numbers)]))

    inputs = keras.Input((len(TEXTS) + 2 * len(center),))
    parts = [inputs[:, len(TEXTS) :]]
    for column in range(len(TEXTS)):
        parts.append(keras.layers.Embedding(32, 8)(inputs[:, column]))
    hidden = keras.layers.Dense(64, "relu")(keras.layers.Concatenate()(parts))
    hidden = keras.layers.Dense(32, "relu")(hidden)
    network = keras.Model(inputs, keras.layers.Dense(2)(hidden))
    channel = train.mechanism.transition_matrix()
    network.compile("adam", ldp.keras_layers.ForwardCorrectedLoss(channel, from_logits=True))
    ldp.fit(
        network, inputs_of(features), train, targets="values", epochs=3, batch_size=1024, verbose=0
    )

    def chances(table: pa.Table) -> dict[str, np.ndarray]:
        """Returns the chance of a purchase for each click, by both models."""
        logits = network.predict(inputs_of(table), batch_size=8192, verbose=0)
        by_network = 1.0 / (1.0 + np.exp(logits[:, 0] - logits[:, 1]))
        return {"trees": trees.predict_proba(table)[:, 1], "network": by_network}

    # No model has learnt from the noisy labels of the last day: they show the calibration where no
    # law is known. Here it is known, too.
    checked = features.take(check.indices)
    for (name, predicted), model in zip(chances(checked).items(), (trees, network), strict=True):
        print(f"\n{name}: {check.evaluate(predicted, 'auc', model=model)}")
        print_calibration(predicted, probability(checked), check.debiased()[:, 1])

    noisy = np.zeros(len(asked))
    for labels in (train, check):
        noisy[labels.indices] = labels.debiased()[:, 1]
    counts = json.loads((folder / "message" / "counts.json").read_text())
    print_totals(log, asked, noisy, counts, chances(log))

    # Each model costs a little less than the whole message, with the counts.
    publish = folder / "publish"
    publish.mkdir(exist_ok=True)
    trees.to_keras().save(publish / "trees.keras")
    network.save(publish / "network.keras")
    print(ldp.guarantee(network))


def print_calibration(predicted: np.ndarray, law: np.ndarray, noisy: np.ndarray) -> None:
    """Prints mean predictions, law and unbiased noisy labels in tenths of the predictions."""
    print("predicted      law   noisy labels")
    tenths = np.array_split(np.argsort(predicted), 10)
    for rows in tenths:
        means = [f"{values[rows].mean():8.4f}" for values in (predicted, law, noisy)]
        print(*means, f"± {noisy[rows].std() / np.sqrt(rows.size):.4f}")
    errors = [abs(predicted[rows].mean() - law[rows].mean()) for rows in tenths]
    share = np.mean((predicted - law) ** 2) / law.var()
    print(f"calibration error: {np.mean(errors):.4f}; explained of the law: {1 - share:.1%}")


def print_totals(
    log: pa.Table,
    asked: pa.Table,
    noisy: np.ndarray,
    counts: dict,
    predicted: dict[str, np.ndarray],
) -> None:
    """Prints the purchases of each campaign by the law, the labels, the counts and the models."""
    of_all, of_asked = groups(log), groups(asked)
    size, asked_size = (
        np.bincount(of, minlength=SIZES * CAMPAIGNS.size) for of in (of_all, of_asked)
    )
    # Estimates of labelled clicks stand for all clicks of their group, with the error of the noise
    # and of the purchases themselves. A model predicts every click.
    scale = size / np.maximum(asked_size, 1)
    labels = np.bincount(of_asked, noisy, minlength=size.size)
    without, bought = np.array(counts["counts"]).T
    bought = (bought + asked_size - without) / 2  # both columns have noise; their sum is known
    spread = bought * (1 - bought / np.maximum(asked_size, 1)) + counts["noise"] ** 2 / 2
    found = {
        "law": (np.bincount(of_all, probability(log)), 0 * size),
        "labels": (scale * labels, scale**2 * asked_size * noisy.var()),
        "counts": (scale * bought, scale**2 * spread),
    }
    found |= {name: (np.bincount(of_all, chance), 0 * size) for name, chance in predicted.items()}
    shape = (CAMPAIGNS.size, SIZES)
    totals = {name: value.reshape(shape).sum(axis=1) for name, (value, _) in found.items()}
    errors = {name: value.reshape(shape).sum(axis=1) ** 0.5 for name, (_, value) in found.items()}
    print("\npurchases    " + "".join(f"{name:>16}" for name in totals))
    for row, campaign in enumerate(CAMPAIGNS):
        cells = [f"{totals[name][row]:,.0f}" for name in totals]
        for place, name in enumerate(totals):
            cells[place] += f" ± {errors[name][row]:.0f}" if errors[name][row] else ""
        print(f"{campaign:<13}" + "".join(f"{cell:>16}" for cell in cells))
    for name in list(totals)[1:]:
        away = np.abs(totals[name] / totals["law"] - 1.0)
        print(f"{name}: {away.mean():.1%} from the law on average, {away.max():.1%} at most")


def report(folder: pathlib.Path) -> None:
    """Advertiser: writes the report to sign, from its store and the files that it sent."""
    import tf_labeldp as ldp

    message = folder / "message"
    found = ldp.report(folder / "advertiser" / "label-store", published=sorted(message.glob("*/*")))
    found.save(message / "report")
    print(found)


STEPS = {"ask": ask, "advertiser": advertiser, "publisher": publisher, "report": report}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", nargs="?", choices=("all", "prepare", *STEPS), default="all")
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default="ads-output")
    parser.add_argument("--rows", type=int, default=1_000_000, help="clicks of `prepare`")
    arguments = parser.parse_args()
    step, folder = arguments.step, arguments.folder
    if step == "prepare":
        write(folder, arguments.rows)
    elif step != "all":
        STEPS[step](folder)
    else:
        # Each step has its own process.
        for name in ("prepare", *STEPS):
            command = [sys.executable, __file__, name, str(folder), "--rows", str(arguments.rows)]
            if subprocess.run(command, check=False).returncode:
                sys.exit(f"{name} failed")


if __name__ == "__main__":
    main()
