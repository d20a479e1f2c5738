"""A bridge to TF Privacy: its Gaussian query as noise here, denoisers as queries there.

The package ``tensorflow-privacy`` is imported at the first use.
"""

from tf_labeldp.tf_privacy._denoised_query import DenoisedQuery
from tf_labeldp.tf_privacy._query_noise import QueryNoise, load

__all__ = [
    "DenoisedQuery",
    "QueryNoise",
    "load",
]
