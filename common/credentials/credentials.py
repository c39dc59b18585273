"""The credentials of a process: where they come from, and what connections make of them.

--tls-cert, --tls-key, --tls-ca, --token-file, --insecure    what the command line says, else
GRADSYNC_TLS_CERT, GRADSYNC_TLS_KEY, GRADSYNC_TLS_CA,
GRADSYNC_TOKEN, GRADSYNC_TOKEN_FILE, GRADSYNC_INSECURE=1     what the environment says, else
GRADSYNC_JOB_SECRET                                          the launcher's, of a job on one host, else
the user's own secret                                        among processes of one user on one host
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from common.credentials.derived import SECRET_BYTES, derive, identity_from
from common.credentials.files import identity_in
from common.credentials.identity import MEMBER_NAME, Identity
from common.credentials.token import read_token, secret_of, token_of
from common.credentials.user_secret import user_secret
from common.errors import UsageError
from common.system.process import JOB_SECRET_VARIABLE, PARENT_VARIABLE

if TYPE_CHECKING:
    import ssl

    import grpc

__all__ = ["TOKEN_VARIABLE", "CredentialFlags", "Credentials", "current", "environment_of", "find", "using"]

TOKEN_VARIABLE = "GRADSYNC_TOKEN"
MAKE_CERTIFICATES = "python -m common.credentials new DIR"
FILE_FIELDS = ("tls_cert", "tls_key", "tls_ca")
KNOWN_TO_ALL = bytes(SECRET_BYTES)  # of proofs where nothing is to be proven


@dataclass(frozen=True, kw_only=True)
class CredentialFlags:
    """Who may take part. Each field is a flag, and the variable GRADSYNC_FIELD."""

    tls_cert: Path | None = None
    """This process's certificate, in PEM, for the name gradsync; with --tls-key and --tls-ca."""
    tls_key: Path | None = None
    """Its key, in a file that only you can read."""
    tls_ca: Path | None = None
    """Certificate of the authority that all processes of the job have theirs from."""
    token_file: Path | None = None
    """A file with the job's token, the same on all hosts: python -m common.credentials token FILE makes it."""
    insecure: bool = False
    """Neither encrypt nor authenticate: whoever reaches a port can take part, read and change all."""


@dataclass(frozen=True)
class Credentials:
    """What this process shows others, and asks of them.

    Args:
        kind: files, token, job, user or none.
        source: where they come from, for people.
        secret: of kinds token and job. The user's own is read, and made, when it is needed.
        files: of kind files.
        paths: theirs, in the order of the flags; or that of the token, if it is in a file.
    """

    kind: str
    source: str
    secret: bytes = field(default=b"", repr=False)
    files: Identity | None = field(default=None, repr=False)
    paths: tuple[Path, ...] = ()

    @property
    def secure(self) -> bool:
        """Connections are encrypted, and both ends prove that they belong."""
        return self.kind != "none"

    @property
    def between_hosts(self) -> bool:
        """Other hosts may be listened and connected to."""
        return self.kind in ("files", "token", "none")

    @cached_property
    def identity(self) -> Identity:
        """
        Raises:
            UsageError: the user's own secret is needed, and cannot be had.
        """
        if not self.secure:
            raise ValueError("without credentials there is nothing to show")
        return self.files or identity_from(self.secret or user_secret())

    def server_context(self) -> ssl.SSLContext:
        """TLS 1.3, for members only. Not of kind none."""
        from common.credentials.contexts import server_context

        return server_context(self.identity)

    def client_context(self) -> ssl.SSLContext:
        """TLS 1.3, to members only; `wrap_socket` must be given server_hostname=MEMBER_NAME. Not of kind none."""
        from common.credentials.contexts import client_context

        return client_context(self.identity)

    def grpc_server(self) -> grpc.ServerCredentials:
        """Clients must have a certificate of our authority; whether it names a member, the server must look itself
        (common/network/rpc.py). Not of kind none."""
        import grpc

        mine = self.identity
        return grpc.ssl_server_credentials([(mine.key, mine.certificate)], mine.authority, require_client_auth=True)

    def grpc_channel_credentials(self) -> grpc.ChannelCredentials:
        """Not of kind none."""
        import grpc

        mine = self.identity
        return grpc.ssl_channel_credentials(mine.authority, mine.key, mine.certificate)

    def grpc_channel_options(self) -> list[tuple[str, str]]:
        """What belongs to a channel with `grpc_channel_credentials`."""
        return [("grpc.ssl_target_name_override", MEMBER_NAME)] if self.secure else []

    def proof_key(self, purpose: bytes) -> bytes:
        """A key of 32 bytes for proofs by HMAC between processes of one host that have the same credentials.

        Certificates in files have no secret that both ends know: then it is the launcher's, or the user's own.
        Of kind none: one that everybody knows.
        """
        if not self.secure:
            return derive(KNOWN_TO_ALL, b"proof " + purpose)
        return derive(self.secret or _job_secret(os.environ) or user_secret(), b"proof " + purpose)


def find(flags: CredentialFlags | None = None, *, environment: Mapping[str, str] | None = None) -> Credentials:
    """The credentials that hold for this process, as the table above says.

    Raises:
        UsageError: what is given contradicts itself, or cannot be read.
    """
    env = os.environ if environment is None else environment
    return (
        _chosen(flags or CredentialFlags(), "", lambda field_name: "--" + field_name.replace("_", "-"))
        or _chosen(_flags_in(env), env.get(TOKEN_VARIABLE, ""), variable_of)
        or _of_this_host(env)
    )


def variable_of(field_name: str) -> str:
    return "GRADSYNC_" + field_name.upper()


def _flags_in(env: Mapping[str, str]) -> CredentialFlags:
    values = {entry.name: env.get(variable_of(entry.name), "") for entry in fields(CredentialFlags)}
    insecure = values.pop("insecure") not in ("", "0")
    return CredentialFlags(
        insecure=insecure, **{name: Path(value) if value else None for name, value in values.items()}
    )


def _chosen(flags: CredentialFlags, token: str, called: Callable[[str], str]) -> Credentials | None:
    """What one place, the command line or the environment, says; None: nothing.

    Args:
        token: itself, where it is in no file.
        called: what a field's flag or variable is called there.
    """
    files = {called(name): path for name in FILE_FIELDS if (path := getattr(flags, name)) is not None}
    said = [" and ".join(files)] if files else []
    said += [TOKEN_VARIABLE] if token else []
    said += [called("token_file")] if flags.token_file else []
    said += [called("insecure")] if flags.insecure else []
    if not said:
        return None
    if len(said) > 1:
        raise UsageError(f"{' and '.join(said)} contradict each other: leave all but one of them out")
    if token:
        return Credentials("token", f"the token of {TOKEN_VARIABLE}", secret_of(token, TOKEN_VARIABLE))
    if flags.token_file:
        path = flags.token_file.absolute()
        return Credentials("token", f"{called('token_file')} {flags.token_file}", read_token(path), paths=(path,))
    if flags.insecure:
        return Credentials("none", called("insecure"))
    if missing := [called(name) for name in FILE_FIELDS if called(name) not in files]:
        raise UsageError(f"{said[0]} needs {' and '.join(missing)} too; {MAKE_CERTIFICATES} makes all three files")
    paths = tuple(path.absolute() for path in files.values())
    return Credentials("files", " ".join(map(str, paths)), files=identity_in(*paths), paths=paths)


def _of_this_host(env: Mapping[str, str]) -> Credentials:
    if secret := _job_secret(env):
        return Credentials("job", "the launcher of this job", secret)
    return Credentials("user", "this user's own secret")


def _job_secret(env: Mapping[str, str]) -> bytes:
    """Empty: there is none."""
    text = env.get(JOB_SECRET_VARIABLE, "")
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b"?"
    if len(secret) not in (0, SECRET_BYTES):
        raise UsageError(f"{JOB_SECRET_VARIABLE} is not what a launcher of ours sets: leave it out")
    return secret


_warned = False


@contextmanager
def using(credentials: Credentials, *, warn: bool = True) -> Iterator[None]:
    """Have this process, and those that it starts, find these within, whatever its environment says otherwise."""
    global _warned
    told = environment_of(credentials)
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        _warned = _warned or not warn
        _warn_of(credentials)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def current() -> Credentials:
    """Those of this process.

    Raises:
        UsageError: see `find`.
    """
    found = find()
    _warn_of(found)
    return found


def _warn_of(credentials: Credentials) -> None:
    """Once in each process that a person has started."""
    global _warned
    if not (credentials.secure or _warned or PARENT_VARIABLE in os.environ):
        _warned = True
        print(
            f"gradsync: WARNING: {credentials.source}: nothing is encrypted or authenticated; "
            "whoever reaches a port of this job can read and change all of it",
            file=sys.stderr,
        )


def environment_of(credentials: Credentials) -> dict[str, str]:
    """What makes a child process find the same ones, whatever else its environment says; of kinds job and user: what
    makes it look for a launcher's.

    Nothing of it belongs on a command line, which all users of a host can read. Of a token in a file it is the path.
    """
    names = {"files": FILE_FIELDS, "token": ("token_file",)}.get(credentials.kind, ())
    paths = dict(zip(names, credentials.paths, strict=False))
    itself = credentials.kind == "token" and not credentials.paths
    return {
        **{variable_of(name): str(paths.get(name, "")) for name in (*FILE_FIELDS, "token_file")},
        variable_of("insecure"): "0" if credentials.secure else "1",
        TOKEN_VARIABLE: token_of(credentials.secret) if itself else "",
    }
