"""llama-server's own tests, run against this server.

They come with the pinned sources of llama.cpp, and are fetched, not kept here. Their models are on
a hub: the embedded one stands in, so what they say of its words and of its numbers of tokens is not
looked at. Files that are left out, and tests that fail, each have a reason here; all others pass.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow

SHIM = Path(__file__).with_name("llama_server_shim.py")
FOLDER = "vendor/llama.cpp/tools/server/tests"

#: Files that are about what this server does not do.
LEFT_OUT = {
    "test_compat_gcp": "Google's prediction form",
    "test_infill": "fill-in-the-middle prompts: /v1/completions takes them ready made",
    "test_lora": "adapters",
    "test_mcp_servers": "tools that the server itself runs",
    "test_proxy": "a proxy for web pages",
    "test_rerank": "rerankers",
    "test_router": "a process per model; ours holds them in one",
    "test_sleep": "--idle unloads instead, and /props does not say so",
    "test_slot_save": "slots to files: the cache's tiers do that for all prompts",
    "test_speculative": "drafts",
    "test_stream": "answers that go on without their client",
    "test_tools_builtin": "tools that the server itself runs",
    "test_vision_api": "images",
}

#: Tests that fail, and why that is right; the others of these files pass.
COUNTS = "it counts tokens of another model"
OTHER = {
    "test_basic": {
        "test_server_multiple_addresses": "one address",
        "test_server_props": "/props does not repeat the seed",
        "test_server_slots": "/slots is always there",
        "test_no_ui": "the page is always there",
        "test_server_model_aliases_and_tags": "one name per model",
    },
    "test_chat_completion": {
        "test_chat_completion": COUNTS,
        "test_chat_completion_cached_tokens": COUNTS,
        "test_chat_template": "__verbose",
        "test_chat_template_assistant_prefill": "__verbose",
        "test_chat_template_continue_final_message_vllm_compat": "__verbose",
        "test_verbose_debug": "__verbose",
        "test_apply_chat_template": "templates by name",
        "test_return_progress": "return_progress",
    },
    "test_compat_anthropic": {
        "test_anthropic_tool_result_with_image": "images are refused with 400, not 500",
        "test_anthropic_vision_format_accepted": "images are refused with 400, not 500",
        "test_anthropic_vision_base64_with_multimodal_model": "images",
        "test_anthropic_empty_messages": "refused, as Anthropic does",
    },
    "test_compat_oai_responses": {
        "test_responses_stream_with_llama_telemetry": "return_progress",
    },
    "test_completion": {
        "test_completion": COUNTS,
        "test_completion_stream": COUNTS,
        "test_completion_prompt_cache": COUNTS,
        "test_completion_response_fields": "response_fields",
        "test_n_probs": "the other model's unknown token has id 0, which counts as missing",
        "test_n_probs_stream": "several tokens may come in one event",
        "test_n_probs_post_sampling": "probabilities after sampling",
        "test_n_probs_post_backend_sampling": "probabilities after sampling",
    },
    "test_ctx_shift": {
        "test_ctx_shift_enabled": "no shift within a request",
        "test_ctx_shift_disabled_short_prompt": COUNTS,
    },
    "test_embedding": {
        "test_embedding_mixed_input": "objects with content",
        "test_embedding_content_text_same_as_string": "objects with content",
        "test_embedding_pooling_none": "one row per text, always",
        "test_embedding_pooling_none_oai": "one row per text, always",
        "test_embedding_error_prompt_too_long": "the message has other words",
        "test_embedding_usage_single": COUNTS,
        "test_embedding_usage_multiple": COUNTS,
    },
    "test_ignore_eos": {
        "test_ignore_eos_populates_logit_bias": "generation_settings.logit_bias",
        "test_ignore_eos_false_no_logit_bias": "generation_settings.logit_bias",
    },
    "test_kv_keep_only_active": {"test_clear_and_restore": "it reads llama-server's log"},
    "test_metrics": {
        "test_metrics_disabled": "/metrics is always there",
        "test_metrics_prometheus_format": "names of metrics",
        "test_metrics_prompt_processed_and_cached": "names of metrics",
        "test_metrics_predicted_total_matches_requests": "names of metrics",
        "test_metrics_embedding_prompt_is_counted": "names of metrics",
        "test_metrics_timings_on_prompt_progress": "return_progress",
    },
    "test_security": {
        "test_access_static_assets_without_api_key": "its page has other files",
        "test_cors_options": "it compares names of headers by case",
        "test_cors_origins_localhost_reflects": "it compares names of headers by case",
        "test_cors_origins_localhost_rejects": "other sites are refused with 403",
        "test_cors_origins_defaults_to_localhost_with_tools_enabled": "tools of the server",
        "test_cors_proxy_only_forwards_explicit_proxy_headers": "a proxy for web pages",
        "test_local_media_file": "images",
    },
    "test_template": {
        "test_reasoning": "thinking is on or off as the template says, not on by default",
        "test_date_inside_prompt": "dates come from the client, in chat_template_kwargs",
    },
    "test_tokenize": {
        "test_tokenize_detokenize": "the other model has not all its words",
        "test_tokenize_with_bos": "the other model's first token is 0",
    },
    "test_tool_call": {},
}


CONFTEST = """
import os, sys
import pytest
import utils
utils.match_regex = lambda *_: True   # another model has other words
from utils import *

@pytest.fixture(autouse=True)
def stop_server_after_each_test():
    yield
    for server in set(server_instances):
        server.stop()
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the tests."""
    for name in ("requests", "openai"):
        pytest.importorskip(name)
    spec = importlib.util.spec_from_file_location("fetch", ROOT / "vendor" / "fetch.py")
    assert spec is not None
    assert spec.loader is not None
    fetch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fetch)
    target = tmp_path_factory.mktemp("suite")
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = fetch.download(ROOT / "vendor" / "llama.cpp.lock", Path(folder))
        except fetch.FetchError as error:
            pytest.skip(f"no sources: {error}")
        with tarfile.open(path) as archive:
            for member in archive:
                inside = member.name.partition("/")[2]
                if member.isfile() and inside.startswith(FOLDER):
                    place = target / inside.removeprefix(FOLDER).lstrip("/")
                    place.parent.mkdir(parents=True, exist_ok=True)
                    data = archive.extractfile(member)
                    assert data is not None
                    place.write_bytes(data.read())
    (target / "conftest.py").write_text(CONFTEST)
    (target / "wget.py").write_text("")
    server = target / "llama-server"
    server.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{SHIM}" "$@"\n')
    server.chmod(0o755)
    return target


def run(suite: Path, name: str, port: int) -> dict[str, str]:
    """Return outcomes of a file by the names of tests."""
    report = suite / f"{name}.xml"
    environment = {
        **os.environ,
        "LLAMA_SERVER_BIN_PATH": str(suite / "llama-server"),
        "LLAMA_TEMPLATES": str(ROOT / "vendor/llama.cpp/models/templates"),
        "PYTHONPATH": str(suite),
        "PORT": str(port),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", "-c", "pytest.ini", f"unit/{name}.py"]
    subprocess.run(command, cwd=suite, env=environment, capture_output=True, check=False)
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        bad = [part.tag for part in case if part.tag in ("failure", "error", "skipped")]
        found[case.get("name", "")] = bad[0] if bad else "passed"
    return found


@pytest.mark.parametrize("name", OTHER)
def test_llama_servers_own_tests_pass(suite: Path, name: str, worker_port: int) -> None:
    found = run(suite, name, worker_port)
    failed = {test for test, outcome in found.items() if outcome in ("failure", "error")}
    unexpected = {test for test in failed if test.partition("[")[0] not in OTHER[name]}
    assert not unexpected
    assert len(found) > len(failed) or len(OTHER[name]) >= len(found)


@pytest.fixture(scope="session")
def worker_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
