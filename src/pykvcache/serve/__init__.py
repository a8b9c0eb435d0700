"""``pykvcache serve``: the prefix cache behind OpenAI's and Anthropic's APIs (extra ``serve``).

====================  ==============================================================
`app`                 routes, keys, errors, logs
`models`, `engine`    which models are loaded; a bounded queue in front of each
`schemas`, `prompts`  what requests say; messages as tokens with their boundaries
`openai`              chat completions, completions, embeddings, models
`anthropic`           messages, with cache diagnostics
`responses`           responses that later ones go on with
`llama_server`        llama-server's own endpoints
`cache`, `metrics`    the prefix cache: seen and steered
====================  ==============================================================
"""

from pykvcache.serve.app import make_app
from pykvcache.serve.models import Models, find_models

__all__ = ["Models", "find_models", "make_app"]
