"""Fits on arrays are counted by test."""

from fits import fits_of_this_test_alone as fits_of_this_test_alone
