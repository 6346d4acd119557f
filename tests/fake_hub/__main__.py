"""`python -m fake_hub --root DIR [--fineweb] [--port P] [--token T] [--latency S]`: serve until interrupted."""

from __future__ import annotations

import argparse
import contextlib
import threading
from pathlib import Path

from fake_hub import FakeHub, write_fineweb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder with datasets/<owner>/<name>/...")
    parser.add_argument("--fineweb", action="store_true", help="first write a small FineWeb below the root")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token", default=None)
    parser.add_argument("--latency", type=float, default=0, help="seconds before every answer begins")
    arguments = parser.parse_args()
    if arguments.fineweb:
        write_fineweb(arguments.root)
    with FakeHub(arguments.root, token=arguments.token, port=arguments.port, latency=arguments.latency) as hub:
        print(f"export HF_ENDPOINT={hub.endpoint}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
