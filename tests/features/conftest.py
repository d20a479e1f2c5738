"""What tests of features share with those of the heads that are fitted on them."""

from fits import fits_apart as fits_apart
