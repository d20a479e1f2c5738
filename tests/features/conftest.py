"""What tests of features share with those of the heads that are fitted on them."""

from fits import fits_apart as fits_apart
from fits import fits_of_this_test_alone as fits_of_this_test_alone
