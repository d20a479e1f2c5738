"""A bridge to TF Privacy: its queries as noise here, denoisers as queries there.

The package ``tensorflow-privacy`` is needed when these are used, not when this part is imported.
"""

from tf_labeldp.tf_privacy._denoised_query import DenoisedQuery
from tf_labeldp.tf_privacy._query_noise import QueryNoise, load

__all__ = [
    "DenoisedQuery",
    "QueryNoise",
    "load",
]
