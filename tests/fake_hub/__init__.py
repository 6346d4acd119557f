"""A Hugging Face Hub on loopback for tests: the real clients read from it and upload to it, and it fails on demand.

`with FakeHub(root) as hub:` serves every repository below `root` (`datasets/<owner>/<name>/...`) at `hub.endpoint`.
`python -m fake_hub --root DIR` does the same from a shell.
"""

from fake_hub.faults import KINDS, Fault, Faults, Kind
from fake_hub.fineweb import write_fineweb
from fake_hub.repository import Repository
from fake_hub.server import FakeHub, Request

__all__ = ["KINDS", "FakeHub", "Fault", "Faults", "Kind", "Repository", "Request", "write_fineweb"]
