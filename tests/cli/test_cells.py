"""Cells as people write them, in tables of `train`, `predict` and `randomize`."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
from pyarrow import csv

from tf_labeldp.cli import main

N = 300
RNG = np.random.default_rng(11)
AGE = RNG.uniform(18.0, 90.0, N).round(1)
DAYS = np.datetime64("1940-01-01") + RNG.integers(0, 20_000, N)
ILL = np.where(AGE > 50, "yes", "no")
LABEL = ("--label", "ill", "--classes", "no", "yes")
RUN = ("--epsilon", "8", "--insecure-seed", "0")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(name, lines, encoding="utf-8", line_end="\n"):
    Path(name).write_bytes((line_end.join(lines) + line_end).encode(encoding))
    return name


def refused(capsys, *words):
    assert main([*words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    return error.partition("error: ")[2]


def of_day(form, day):
    year, month, of_month = str(day).split("-")
    return form.replace("Y", year).replace("M", month).replace("D", of_month)


def decimal_comma(number, digits=1):
    return f"{number:.{digits}f}".replace(".", ",")


GERMAN = [
    "# exported by hand; not checked",
    ";Nr;Alter;Geburt;CRP;Gewicht;Preis;Zeit;PLZ;Beruf;ill",
    *(
        ";".join(
            (
                str(i),
                f"{i:06d}",
                decimal_comma(AGE[i]),
                of_day("D.M.Y", DAYS[i]),
                "<0,6" if i % 9 == 0 else "90+" if i % 7 == 0 else decimal_comma(i / 8),
                f"{60 + i % 40} kg",
                f"{1 + i % 3}.{100 + i},50 EUR",
                f"{i % 24}:{i % 60:02d}",
                f"{1000 + i * 7:05d}",
                ("Köchin", "Schmied")[i % 2],
                ILL[i],
            )
        )
        for i in range(N)
    ),
]
FORMS = (
    "german.csv has its cells between semicolons, and numbers have a decimal comma",
    "german.csv has 1 line of comments above its header line",
    "german.csv is not UTF-8 text, and was read as Latin-1",
    "Nr: ids, which are no feature",
    "Geburt: dates of the form DD.MM.YYYY, read as days",
    "CRP: numbers; 72 of 300 have a sign of limit (<, >, +) and are read as the limit",
    "Gewicht: numbers with the unit kg",
    "Preis: numbers with the unit EUR",
    "Zeit: times of day, read as hours",
    "PLZ: codes with leading zeros, read as text; for numbers --types PLZ=number",
    "'': a column without a name that numbers the rows, as the index of to_csv(), is left out",
)
"""Remarks on the table, one per column."""


def test_a_table_as_it_is_and_its_predictions(capsys):
    """What fit found is in the model's file, ids come back, and CSV in the form that came in."""
    written("german.csv", GERMAN, "cp1252", "\r\n")
    words = ("german.csv", *LABEL, *RUN, "--method", "head", "--types", "Nr=id")
    assert main(["train", *words, "--output", "out"]) == 0
    shown = capsys.readouterr().err
    for text in FORMS:
        assert f"remark: {text}" in shown
    assert "8 features: Alter (number), Geburt (date, in days), CRP (number)" in shown
    card = Path("out/README.md").read_text()
    assert "dates of the form DD.MM.YYYY" in card and main(["verify", "out"]) == 0
    capsys.readouterr()
    # Fewer rows, of which none shows the order of days and months, and other occupations.
    few = [line.replace("Schmied", " schmied ") for line in GERMAN[1:8]]
    written("new.csv", few, "cp1252", "\r\n")
    assert main(["predict", "out", "new.csv", "--output", "new-out.csv"]) == 0
    shown = capsys.readouterr()
    assert "warning: Beruf: 50.0% of the cells have a category that is new" in shown.err
    assert "some differ by blanks around them or by capitals" in shown.err
    content = Path("new-out.csv").read_bytes()
    assert content.startswith(b"Nr;prediction;probability_no;probability_yes\r\n000000;")
    assert b"\r\n000005;" in content and b"." not in content and content.count(b"\r\n") == 7
    written("bad.csv", [few[0], few[1].replace("EUR", "USD")], "cp1252")
    assert "takes numbers with the unit EUR in column Preis" in refused(
        capsys, "predict", "out", "bad.csv", "--output", "bad-out.csv"
    )
    numbers = ("--column", "Preis", "--task", "regression", "--low", "0", "--high", "9999")
    output = ("--epsilon", "9", "--id", "Nr", "--output", "noisy.csv")
    assert main(["randomize", "german.csv", *numbers, *output]) == 0
    assert "remark: Preis: numbers with the unit EUR" in capsys.readouterr().err
    assert Path("noisy.csv").read_text().splitlines()[6].startswith("000005,")
    assert main(["predict", "out", "german.csv", "--id", "PLZ", "--output", "all.csv"]) == 0
    parsed = csv.read_csv(
        "all.csv",
        parse_options=csv.ParseOptions(delimiter=";"),
        convert_options=csv.ConvertOptions(column_types={"PLZ": "string"}),
    )
    assert parsed["PLZ"].to_pylist() == [f"{1000 + i * 7:05d}" for i in range(N)]
    assert np.mean(parsed["prediction"].to_numpy() == ILL) > 0.7


@pytest.mark.parametrize(
    ("lines", "options", "reason"),
    [
        (
            ["a;b;ill", "4.28;6,5;no", "1.5;7,5;yes"],
            (),
            "column a has decimal points and column b decimal commas, but a file has one "
            "convention. Correct one of them, or say how a column is read: "
            "--types a=number:point, or --types a=text",
        ),
        (
            ["day;b;ill", "03/04/2024;6;no", "05/06/2024;7;yes"],
            (),
            "the dates of column day can be DD/MM/YYYY or MM/DD/YYYY. Choose one: "
            "--types day=date:DD/MM/YYYY",
        ),
        (["a,ill", "1,no"], ("--types", "a"), "expected --types COLUMN=KIND, got 'a'"),
        (["a,ill", "1,no"], ("--types", "a=date:DD"), "expected --types COLUMN=KIND"),
        (["a,ill", "1,no"], ("--types", "b=text"), "--types b: the table has no column"),
        (
            ["a,ILL", "1,no"],
            (),
            "--label ill: the table has 0 columns of this name; do you mean ILL",
        ),
        (["a,,ill", "1,x,no", "2,y,yes"], (), "or leave it out: --drop ''"),
        (["a,v 1,ill", "1,,no"], (), "has no value at all; leave it out: --drop 'v 1'"),
    ],
)
def test_refusals_before_the_charge_are_lines_to_paste(capsys, lines, options, reason):
    written("data.csv", lines)
    words = ("data.csv", *LABEL, *RUN, "--store", "private", *options)
    assert reason in refused(capsys, "train", *words)
    assert not Path("private").exists() and not Path("trained").exists()


@pytest.mark.parametrize("name", ["customer number", "", "-x", "it's; $HOME"])
def test_advice_is_pasted_as_it_is(capsys, name):
    """Whatever the name of a column that has no value, and that is left out as the error says."""
    quoted = '"' + name.replace('"', '""') + '"'
    written("data.csv", [f"{quoted},v,ill", "x,,no", "x,,yes"])
    first = ("data.csv", *LABEL, *RUN)
    advice = refused(capsys, "train", *first).partition("leave it out: ")[2]
    words = shlex.split(advice)
    assert words[0].startswith("--drop")
    error = refused(capsys, "train", *first, *words)
    assert "arguments" not in error and error.partition("leave it out: ")[2] != advice


@pytest.mark.parametrize(
    ("labels", "others", "total", "remark"),
    [
        (["4.282", "1.500"], ["6,5", "7,25"], 5782.0, "1.234 is read as 1234"),
        (["4.282", "1.500"], ["6.5", "7.25"], 5.782, None),
        (["4.282", "1.500"], ["a", "b"], 5.782, "1.234 is read as 1.234; otherwise --types y="),
        (["1.234,56 EUR", "1,44 EUR"], ["a", "b"], 1236.0, "numbers with the unit EUR"),
        (["6,5", "1.234,5"], ["a", "b"], 1241.0, "numbers have a decimal comma"),
    ],
)
def test_labels_are_read_in_the_convention_of_the_file(capsys, labels, others, total, remark):
    """The total of 5,318,404 was stated as 174,722: thousands were read as fractions."""
    rows = [f"{i};{others[i % 2]};{labels[i % 2]}" for i in range(N)]
    written("data.csv", ["id;other;y", *rows])
    words = ("--column", "y", "--task", "regression", "--low", "0", "--high", "5000")
    assert main(["randomize", "data.csv", *words, "--epsilon", "100", "--output", "n.csv"]) == 0
    shown = capsys.readouterr()
    stated = float(shown.out.partition("noisy ones: ")[2].split()[0])
    assert stated == pytest.approx(total * N / 2, rel=0.05, abs=3 * N)
    assert remark is None or remark in shown.err


def test_labels_do_not_decide_how_a_feature_is_read(capsys):
    """The form of a feature is in the model's file: one label of 6,5 would change it."""
    written("data.csv", ["a;y", *[f"1.{100 + i};{'6,5' if i == 9 else 7}" for i in range(N)]])
    words = ("data.csv", "--label", "y", "--low", "0", "--high", "9", *RUN, "--store", "private")
    error = refused(capsys, "train", *words)
    assert "column a can be read in two ways, and only the labels show a decimal sign" in error
    assert error.endswith("Say how it is read: --types a=number:comma")
    assert not Path("private").exists()


DATES = {
    "Y-M-D": "YYYY-MM-DD",
    "Y/M/D": "YYYY/MM/DD",
    "D.M.Y": "DD.MM.YYYY",
    "D/M/Y": "DD/MM/YYYY",
    "D/M/Y 13:05": "DD/MM/YYYY",
    "Y-M-DT01:02:03Z": "YYYY-MM-DD",
    "D July Y": "DD MONTH YYYY",
    "Juli D, Y": "MONTH DD YYYY",
    "Sep Y": "MONTH YYYY",
    "Y-M": "YYYY-MM",
    "M/Y": "MM/YYYY",
}
COLUMNS = {
    **{
        form: (
            lambda i, form=form: of_day(form, DAYS[i]),
            f"dates of the form {words}, read as days",
        )
        for form, words in DATES.items()
    },
    "half": (lambda i: f"{1 + i % 12}:{i % 60:02d} pm", "times of day, read as hours"),
    "percent": (lambda i: f"{i % 90} %", "numbers with the unit %"),
    "dollars": (lambda i: f"-${1000 + i:,}.50", "numbers with the unit $"),
    "grouped": (lambda i: f"{1000 + i:,}", "numbers in which 1,234 is read as 1234; otherwise"),
    "limits": (
        lambda i: f">{i}" if i % 3 else f"{i}.5",
        "numbers; 200 of 300 have a sign of limit",
    ),
    "codes": (lambda i: f"{i:04d}", "codes with leading zeros, read as text; for numbers"),
    "short": (lambda i: of_day("D.M.", DAYS[i]) + "45", "dates without a century, read as text"),
    "mixed": (
        lambda i: "k.A." if i == 7 else f"{i}.5",
        "text, of which 1 of 300 cells are no numbers; to count these as missing --types mixed=",
    ),
    "named": (
        lambda i: "k.A." if i == 7 else f"{i}.5",
        "numbers; cells of another form are missing: 1 cell, the first in row 9 (the header is "
        "row 1): 'k.A.'",
    ),
    "Unnamed: 0": (lambda i: str(i), None),
    "plain": (lambda i: f"{i}.25", None),
    "version": (lambda i: f"1.{i}.2", None),
    "band": (lambda i: ("<=50K", ">50K")[i % 2], None),
    "school": (lambda i: f"20{i % 12:02d}-{1 + i % 12:02d}", None),
    "part": (lambda i: f"{3000 + i}-{1 + i % 12:02d}", None),
    "diagnosis": (lambda i: f"E{i % 20}.9", None),
    "yes": (lambda i: ("True", "False")[i % 2], None),
}
"""Cells of row i by column, and the line on it; None for cells as they stand."""


def test_each_form_is_stated_before_the_charge(capsys):
    quoted = [[f'"{cells(i)}"' for cells, _ in COLUMNS.values()] for i in range(N)]
    rows = [",".join([*row, ILL[i]]) for i, row in enumerate(quoted)]
    header = ",".join(f'"{name}"' for name in [*COLUMNS, "ill"])
    written("data.csv", [header, *rows])
    words = ("data.csv", *LABEL, *RUN, "--types", "named=number")
    written("taken", [])  # no store: refused after all that is stated before the charge
    assert main(["train", *words, "--store", "taken"]) == 2
    shown = capsys.readouterr().err
    for name, (_, line) in COLUMNS.items():
        if line is None:
            assert f"remark: {name}:" not in shown
        else:
            assert f"remark: {name}: {line}" in shown
    for text in ("plain (number)", "version (text)", "diagnosis (text)", "yes (number)"):
        assert text in shown
    assert "remark: 'Unnamed: 0': a column without a name that numbers the rows" in shown
    assert "left out: Unnamed: 0" in shown and "taken exists and is not a label store" in shown


def test_thousands_of_categories_and_numbers_beyond_single_precision_are_said(capsys):
    rows = [f"w{i},{'1e39' if i == 3 else i},{('no', 'yes')[i % 2]}" for i in range(1200)]
    written("data.csv", ["word,far,ill", *rows])
    words = ("data.csv", *LABEL, *RUN, "--store", "private")
    assert main(["train", *words]) == 2
    shown = capsys.readouterr().err
    assert "word: text with 1,200 different values, each of which becomes a category" in shown
    assert "column 'far' must be within float32, up to 3.4e38, but 1 of 1200 entries" in shown
    assert not list(Path("private").glob("records/[0-9]*"))


def test_several_files_have_one_convention(capsys):
    for name, labels in (("a", ("6,5", "7,25")), ("b", ("4.282", "1.500"))):
        rows = [f"{name}{i};{labels[i % 2]}" for i in range(20)]
        written(f"{name}.csv", ["id;y", *rows])
    words = ("--column", "y", "--task", "regression", "--low", "0", "--high", "5000")
    output = ("--epsilon", "1", "--output", "n.csv")
    error = refused(capsys, "randomize", "a.csv", "b.csv", *words, *output)
    assert "decimal commas in a.csv, and can be read in two ways in b.csv" in error
    advice = error.partition("; ")[2].partition(" or ")[0]
    assert main(["randomize", "a.csv", "b.csv", *words, *output, *shlex.split(advice)]) == 0


def test_a_header_of_two_lines_is_named(capsys):
    written("data.csv", [",a,b", ",x,ill", "0,1.5,no", "1,2.5,yes"])
    error = refused(capsys, "train", "data.csv", *LABEL, *RUN)
    assert "it is in row 2, as of a header of two lines (a MultiIndex of pandas)" in error
