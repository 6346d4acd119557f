"""Tokens and proxies of the Hub: taken from where huggingface_hub takes them, and named when they do not work."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub
from workspace import TINY_MODEL, Workspace

TOKEN, WRONG = "hf_right", "hf_wrongCANARYwrong"
STREAM = [*TINY_MODEL, "--dataset=HuggingFaceFW/fineweb", "--launch=none", "--experiment=none"]
MODEL = ["--preset=smoke_cpu", "--init-from=alice/model", "--input=x.txt", "--experiment=none"]
FILES = {"HF_HOME": "hf/token", "HF_TOKEN_PATH": "elsewhere/mine"}


@pytest.fixture
def hub(hub_root: Path) -> Any:
    """A Hub that asks for a token."""
    with FakeHub(hub_root, token=TOKEN) as hub:
        yield hub


@pytest.fixture
def outsider(tmp_path: Path, hub: FakeHub) -> Workspace:
    """A workspace with a Hub, and without a token for it."""
    environment = hub.environment(tmp_path / "hf")
    del environment["HF_TOKEN"]
    return Workspace(tmp_path, environment)


def with_token(outsider: Workspace, source: str, token: str) -> tuple[Workspace, str]:
    """Return the workspace with a token in a variable or file, and how messages name that place."""
    if source not in FILES:
        return Workspace(outsider.root, {**outsider.extra_environment, source: token}), f"in {source}"
    path = outsider.root / FILES[source]
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{token}\n")
    path.with_name("stored_tokens").write_text(f"[laptop]\nhf_token = {token}\n")
    location = {} if source == "HF_HOME" else {source: str(path)}
    return Workspace(outsider.root, {**outsider.extra_environment, **location}), f"`laptop` in {path}"


@pytest.mark.parametrize("source", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", *FILES])
def test_a_token_that_is_not_accepted_is_named(outsider: Workspace, source: str) -> None:
    workspace, place = with_token(outsider, source, WRONG)
    remedy = "hf auth login" if source in FILES else "unset it: public data need none"
    words = (f"does not accept the token {place}", "Invalid credentials", "expired", remedy)
    for code, command in (
        (3, STREAM),
        (3, MODEL),
    ):
        process = workspace.orchestrate(*command).refused(code, *words)
        assert WRONG not in process.out + process.err
    right, _ = with_token(outsider, source, TOKEN)
    right.orchestrate(*STREAM, "--max-samples=60").succeeded()


def test_conditions_that_are_not_accepted_name_the_owner(outsider: Workspace, hub: FakeHub) -> None:
    hub.gated = True
    workspace, place = with_token(outsider, "HF_HOME", TOKEN)
    workspace.orchestrate(*STREAM).refused(
        3, "403", f"the token {place}, which is alice's, has no access", "conditions"
    )
    outsider.extra_environment["HF_HUB_DISABLE_IMPLICIT_TOKEN"] = "1"
    outsider.orchestrate(*STREAM).refused(3, "401", "gated or private", "hf auth login")


ORACLE = """
import json, sys, urllib.request
from huggingface_hub import get_token
from orchestrator import _native
url = sys.argv[1]
host = urllib.request.urlparse(url).netloc
proxies = {} if urllib.request.proxy_bypass(host) else urllib.request.getproxies()
scheme = url.partition(":")[0]
print(json.dumps([get_token(), _native.hub_token(), proxies.get(scheme, proxies.get("all")), _native.hub_proxy(url)]))
"""


def test_tokens_are_those_of_huggingface_hub(outsider: Workspace) -> None:
    (outsider.root / "hf").mkdir()
    (outsider.root / "hf" / "token").write_text("hf_file\n")
    places = {"hf_new": "in HF_TOKEN", "hf_old": "in HUGGING_FACE_HUB_TOKEN", "hf_file": f"in {outsider.root}/hf/token"}
    for new, old in itertools.product(["hf_new", "", None], ["hf_old", None]):
        all_variables = {"HF_TOKEN": new, "HUGGING_FACE_HUB_TOKEN": old}
        token_variables = {name: value for name, value in all_variables.items() if value is not None}
        workspace = Workspace(outsider.root, {**outsider.extra_environment, **token_variables})
        theirs, ours, _, _ = oracle(workspace, "https://huggingface.co")
        assert ours[0] == places[theirs], token_variables


@pytest.mark.parametrize("variables", [
    {"HTTPS_PROXY": "http://a:1", "HTTP_PROXY": "http://b:2"},
    {"https_proxy": "http://small:1", "HTTPS_PROXY": "http://a:1", "ALL_PROXY": "http://c:3"},
    {"ALL_PROXY": "http://c:3", "NO_PROXY": "localhost,.co"},
    {"HTTP_PROXY": "http://b:2"},
])  # fmt: skip
def test_proxies_are_those_of_the_scheme(outsider: Workspace, variables: dict[str, str]) -> None:
    workspace = Workspace(outsider.root, variables)
    for url in ("https://huggingface.co/x", "http://huggingface.com/x"):
        _, _, theirs, ours = oracle(workspace, url)
        assert (ours is None) == (theirs is None)
        if theirs:
            assert ours.startswith(f"the proxy {theirs.rstrip('/')}")


def oracle(workspace: Workspace, url: str) -> list[Any]:
    values: list[Any] = json.loads(workspace.command(workspace.python, "-c", ORACLE, url).succeeded().out)
    return values


@pytest.mark.parametrize(("proxy", "words"), [
    ("http://me:CANARY@127.0.0.1:9", ("the proxy http://127.0.0.1:9", "HTTP_PROXY names does not connect", "unset")),
    ("http://me:CANARY@proxy.invalid:3128", ("the proxy http://proxy.invalid:3128", "does not connect (failed")),
])  # fmt: skip
def test_a_dead_proxy_is_named(outsider: Workspace, proxy: str, words: tuple[str, ...]) -> None:
    workspace = Workspace(outsider.root, {**outsider.extra_environment, "HTTP_PROXY": proxy, "HF_TOKEN": TOKEN})
    process = workspace.orchestrate(*STREAM).refused(3, *words)
    assert "CANARY" not in process.out + process.err
    process = workspace.orchestrate(*MODEL).refused(3, words[0], "HTTP_PROXY")
    assert "CANARY" not in process.out + process.err


def test_a_proxy_that_cannot_be_used_is_refused(outsider: Workspace) -> None:
    workspace = Workspace(outsider.root, {**outsider.extra_environment, "ALL_PROXY": "socks5://me:CANARY@h:1"})
    process = workspace.orchestrate(*STREAM).refused(2, "ALL_PROXY", "SOCKS proxy socks5://h:1", "unset")
    assert "CANARY" not in process.out + process.err
    workspace.extra_environment["NO_PROXY"] = "127.0.0.1,localhost"
    workspace.extra_environment["HF_TOKEN"] = TOKEN
    workspace.orchestrate(*STREAM, "--max-samples=60").succeeded()
