"""The part of rules_cc that Bazel 4.2 loads for any test: its own native rules.

Debian's bazel-rules-cc is made for a later Bazel.
"""

cc_binary = native.cc_binary
cc_library = native.cc_library
cc_test = native.cc_test
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
