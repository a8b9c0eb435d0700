"""Many sequences generated at once: one decode per step.

================  ==================================================================
`generator.py`    `BatchGenerator`: what users hold, and who makes its steps
`handle.py`       `GenerationHandle`: what a user holds of a request
`request.py`      `GenerationRequest`: one request, and what has come of it
`schedule.py`     who runs, who waits, who leaves when cells run out
`step.py`         one decode for all that run: what goes in, what comes out
================  ==================================================================
"""

from pykvcache.generate.generator import BatchGenerator
from pykvcache.generate.handle import GenerationHandle, HandleStream, RequestTimes

__all__ = ["BatchGenerator", "GenerationHandle", "HandleStream", "RequestTimes"]
