"""`python -m common.credentials`: make a token, or certificates, for the hosts of a job."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common.credentials.files import VALID_DAYS, new_certificates
from common.credentials.token import make_token
from common.errors import GradSyncError

__all__ = ["main"]

PROGRAM = "common.credentials"


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(f"python -m {PROGRAM}", description="Who may take part in a job.")
    commands = parser.add_subparsers(required=True, metavar="token|new")
    token = commands.add_parser("token", help="one secret for all hosts, in a file")
    token.add_argument("file", type=Path, metavar="FILE", help="is made; copy it to every host")
    token.set_defaults(do=lambda given: token_lines(given.file))
    new = commands.add_parser("new", help="an authority, and a certificate for each host")
    new.add_argument("folder", type=Path, metavar="DIR", help="is filled")
    new.add_argument("--hosts", type=int, default=1, metavar="N", help="a certificate for each of N hosts (default: 1)")
    new.set_defaults(do=lambda given: certificate_lines(given.folder, given.hosts))
    given = parser.parse_args(args)
    try:
        print("\n".join(given.do(given)))
    except GradSyncError as exc:
        print(f"{PROGRAM}: {type(exc).__name__}: {exc}", file=sys.stderr)
        return exc.exit_code
    return 0


def token_lines(file: Path) -> list[str]:
    """Make it, and say what to do with it."""
    make_token(file)
    return [
        f"{file} holds the token of one job. Copy it to every host (scp -p {file} HOST:), and start there with",
        f"  --token-file {file}",
        f"or set GRADSYNC_TOKEN_FILE={file}. Whoever has it can take part: a new job is given a new one.",
    ]


def certificate_lines(folder: Path, hosts: int) -> list[str]:
    """Make them, and say what to do with them."""
    places = new_certificates(folder, hosts)
    lines = [f"certificates for {len(places)} host(s), valid for {VALID_DAYS} days; start with"]
    for place in places:
        lines.append(f"  --tls-cert {place / 'cert.pem'} --tls-key {place / 'key.pem'} --tls-ca {place / 'ca.pem'}")
    return [*lines, "The authority's key was not kept: for further hosts make all of them anew."]


if __name__ == "__main__":
    sys.exit(main())
