"""Generate many sequences at once: one decode per step.

================  ==================================================================
`generator.py`    `BatchGenerator`: submits requests and drives steps
`handle.py`       `GenerationHandle`: the object through which a user controls a request
`request.py`      `GenerationRequest`: one request and its results
`schedule.py`     which requests run, wait, or are parked
`step.py`         one decode for all running requests
================  ==================================================================
"""

from pykvcache.generate.generator import BatchGenerator
from pykvcache.generate.handle import GenerationHandle, HandleStream, RequestTimes

__all__ = ["BatchGenerator", "GenerationHandle", "HandleStream", "RequestTimes"]
