"""Generate many sequences at once: one decode per step.

================  ==================================================================
`generator.py`    `BatchGenerator`: submits requests and drives steps
`request.py`      `GenerationRequest`, and `GenerationHandle`, with which a user controls it
`schedule.py`     which requests run, wait, or are parked
`step.py`         one decode for all running requests
================  ==================================================================
"""

from pykvcache.generate.generator import BatchGenerator
from pykvcache.generate.request import GenerationHandle, HandleStream, RequestTimes

__all__ = ["BatchGenerator", "GenerationHandle", "HandleStream", "RequestTimes"]
