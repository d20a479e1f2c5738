"""Fixtures of the tests of boosted trees."""

from fits import fits_apart as fits_apart
