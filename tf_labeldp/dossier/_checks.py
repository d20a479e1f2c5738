"""How the parties of a statement check its assumptions, by code."""

from __future__ import annotations

_MADE_WITHOUT_LABELS = (
    "Read the code that made them. Pass objects of this library, which carry receipts, instead of "
    "arrays."
)
_ROWS_PER_PERSON = "Count the rows of each person."
_CIPHERS = "Read the certificates of the operating system and of OpenSSL; list who can read keys."
_PROTOCOL = "It can't be checked here: the protocol has no server that sees all users."

HOW_TO_CHECK = {
    "public-features": "Read the code that made the features; count the rows of each person.",
    "all-uses-counted": "List everyone who can read the labels without the vault.",
    "array-of-labels": "List everyone who can read the labels, and their other fits.",
    "only-release": "List all files that were made from these labels.",
    "public-inputs": _MADE_WITHOUT_LABELS,
    "public-encoder": _MADE_WITHOUT_LABELS,
    "public-bins": _MADE_WITHOUT_LABELS,
    "public-clusters": _MADE_WITHOUT_LABELS,
    "public-sample-weights": _MADE_WITHOUT_LABELS,
    "public-rows": "Read the query that chose and sorted the rows.",
    "public-columns": "Read the code that made the other columns and their order.",
    "public-settings": "Find the document that fixed classes, range and settings before the draw.",
    "labels-in-range": "Find the document that fixed the classes or the range before the draw.",
    "one-example-per-set": _ROWS_PER_PERSON,
    "examples-per-user": _ROWS_PER_PERSON,
    "distinct-examples": "Count the rows of each id.",
    "rows-per-id": _ROWS_PER_PERSON,
    "stated-by-label": "Count the rows of each user, and multiply epsilon by the largest count.",
    "cluster-sizes": "Count the users of each cluster.",
    "disjoint-people": "Compare the ids of both populations.",
    "unique-ids": "Count the rows of each id. Engines refuse repeats within a release.",
    "same-examples": "Compare the ids of the examples of each vault, row by row.",
    "public-arrivals": "Ask whether an outcome becomes known earlier; if so, wait for all of them.",
    "metrics-reported": "Read logs and dashboards, or train without metrics.",
    "only-model-published": "List all files that were made from these labels.",
    "fixed-in-advance": "Compare the history with the plan of the study.",
    "steps-fixed": "Compare the number of steps with the plan of the study.",
    "settings-not-tuned": "Find the plan of the study; PrivateSearchCV pays for choices.",
    "public-steps": "Read the code that made and fitted the pipeline.",
    "initial-weights": "Trace the origin of the file; tf_labeldp.load_model reads its receipts.",
    "no-vault": "List everyone who can read the labels; a vault tracks all uses.",
    "labels-of-this-draw": "Read the code of the data set; tf_labeldp.fit makes it itself.",
    "gaussian-noise-every-step": "Run the tests of this library, and an audit of the training.",
    "label-distance-clipping": "Run the tests of this library, and an audit of the training.",
    "poisson-sampling": "Run the tests of this library; keep the members of batches secret.",
    "secure-random-bits": _CIPHERS,
    "secure-key-stream": _CIPHERS,
    "secure-keyed-draws": _CIPHERS,
    "generator-state-secret": "List who can read the memory and the checkpoints of the training.",
    "tensor-float-32": "Turn TensorFloat-32 off, and compare the norms.",
    "claimed-mechanism": "Ask for a proof; run check_mechanism and an audit.",
    "claimed-noise": "Ask for a proof; run an audit of the training.",
    "declared": "Ask the author of the declaration for the facts behind it.",
    "drawn-elsewhere": "Read the protocol of the survey: its cards or dice, and who saw answers.",
    "answers-missing": "Ask who did not answer, and whether the question itself kept them away.",
    "users-follow-protocol": _PROTOCOL,
    "only-reports-seen": _PROTOCOL,
    "messages-between-users": _PROTOCOL,
    "one-message-seen": _PROTOCOL,
    "no-collusion": _PROTOCOL,
    "not-promised": "Nothing is promised until this is mended.",
    "no-record": "Ask who trained the model, and declare it with tf_labeldp.declare.",
    "other": "Its author wrote this sentence; ask them how to check it.",
}
"""The check of each assumption; docs/privacy.md#who-must-vouch-for-what lists the same codes."""
