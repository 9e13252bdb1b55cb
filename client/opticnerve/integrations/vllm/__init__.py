"""vLLM: requests with the service's rows, inline or by reference, and the connector that fetches those by reference.

Importing this package needs neither vLLM nor torch; `connector`, which vLLM loads by its name, needs both.
"""

from opticnerve.integrations.vllm.reference import Reference
from opticnerve.integrations.vllm.requests import Encoder, RowsError, offline

__all__ = ["Encoder", "Reference", "RowsError", "offline"]
