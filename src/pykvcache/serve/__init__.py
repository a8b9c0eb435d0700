"""``pykvcache serve``: the prefix cache behind OpenAI's and Anthropic's APIs (extra ``serve``).

====================  ==============================================================
`app`, `server`       routes, keys, errors, logs; uvicorn
`models`, `engine`    which models are loaded; a bounded queue in front of each
`schemas`, `prompts`  requests; messages as tokens with their boundaries
`answers`             results of a generation, as events or as one object
`openai`              chat completions, completions, embeddings, models
`anthropic`           messages, with cache diagnostics
`responses`           stored responses, which later ones continue
`llama_server`        llama-server's own endpoints
`cache`, `pins`       endpoints that show and steer the prefix cache
====================  ==============================================================
"""

from pykvcache.serve.app import is_loopback, make_app
from pykvcache.serve.engine import Defaults
from pykvcache.serve.models import Models, find_models
from pykvcache.serve.responses import Responses
from pykvcache.serve.server import run

__all__ = ["Defaults", "Models", "Responses", "find_models", "is_loopback", "make_app", "run"]
