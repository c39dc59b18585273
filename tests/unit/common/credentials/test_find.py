"""Which credentials a process has: the command line before the environment, before a launcher's, before its user's."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.credentials.__main__ import main
from common.credentials.credentials import CredentialFlags, Credentials, current, environment_of, find, using
from common.credentials.token import make_token, new_token, read_token, secret_of
from common.credentials.user_secret import user_secret
from common.errors import UsageError
from common.system.process import JOB_SECRET_VARIABLE

JOB = {JOB_SECRET_VARIABLE: "5a" * 32}
TOKEN = new_token()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    make_token(tmp_path / "token")
    return tmp_path / "token"


@pytest.fixture
def certificates(tmp_path: Path) -> list[Path]:
    assert main(["new", str(tmp_path / "made")]) == 0
    return [tmp_path / "made" / name for name in ("cert.pem", "key.pem", "ca.pem")]


def as_flags(certificates: list[Path]) -> CredentialFlags:
    return CredentialFlags(tls_cert=certificates[0], tls_key=certificates[1], tls_ca=certificates[2])


def test_what_is_said_last_before_others(token_file: Path, certificates: list[Path]) -> None:
    token = {**JOB, "GRADSYNC_TOKEN": TOKEN}
    assert find(environment={}).kind == "user"
    assert find(environment=JOB) == Credentials("job", "the launcher of this job", bytes.fromhex("5a" * 32))
    assert find(environment=token).secret == secret_of(TOKEN, "")
    assert find(environment={**JOB, "GRADSYNC_TOKEN_FILE": str(token_file)}).secret == read_token(token_file)
    assert find(environment={**JOB, "GRADSYNC_INSECURE": "1"}).kind == "none"
    assert find(environment={**JOB, "GRADSYNC_INSECURE": "0"}).kind == "job"
    assert find(CredentialFlags(token_file=token_file), environment=token).secret == read_token(token_file)
    assert find(CredentialFlags(insecure=True), environment=token).kind == "none"
    assert find(as_flags(certificates), environment=token).paths == tuple(certificates)


def test_a_contradiction_is_told(token_file: Path, certificates: list[Path]) -> None:
    for said, environment, words in (
        (CredentialFlags(tls_cert=certificates[0]), {}, "--tls-cert needs --tls-key and --tls-ca too"),
        (CredentialFlags(token_file=token_file, insecure=True), {}, "--token-file and --insecure contradict"),
        (None, {"GRADSYNC_TLS_KEY": "k", "GRADSYNC_TLS_CA": "c"}, "GRADSYNC_TLS_KEY and GRADSYNC_TLS_CA needs"),
        (None, {"GRADSYNC_TOKEN": TOKEN, "GRADSYNC_TOKEN_FILE": "f"}, "GRADSYNC_TOKEN and GRADSYNC_TOKEN_FILE"),
        (None, {"GRADSYNC_TOKEN": TOKEN, "GRADSYNC_TLS_CERT": "c"}, "GRADSYNC_TLS_CERT and GRADSYNC_TOKEN contra"),
        (None, {"GRADSYNC_TOKEN": "weak"}, "GRADSYNC_TOKEN holds no GradSync token"),
        (None, {JOB_SECRET_VARIABLE: "weak"}, "GRADSYNC_JOB_SECRET is not what a launcher of ours sets"),
        (None, {JOB_SECRET_VARIABLE: "5a" * 16}, "GRADSYNC_JOB_SECRET is not what a launcher of ours sets"),
    ):
        with pytest.raises(UsageError, match=words) as caught:
            find(said, environment=environment)
        assert TOKEN not in str(caught.value)


def test_files_that_are_no_certificates_are_named(certificates: list[Path], tmp_path: Path) -> None:
    flags = as_flags(certificates)
    certificates[0].write_text("nothing")
    with pytest.raises(UsageError, match=r"cert\.pem, .*key\.pem and .*ca\.pem are not a certificate, its key"):
        find(flags)
    certificates[1].chmod(0o644)
    with pytest.raises(UsageError, match=r"the key file .*key\.pem can be read by others; chmod 600"):
        find(flags)
    certificates[0].unlink()
    with pytest.raises(UsageError, match=r"cannot read --tls-cert .*cert\.pem: No such file"):
        find(flags)


def test_children_find_the_same(certificates: list[Path]) -> None:
    outer = {"GRADSYNC_TOKEN_FILE": "/else/where", "GRADSYNC_INSECURE": "1", **JOB}
    for given in (
        Credentials("token", "", secret_of(TOKEN, "")),
        Credentials("none", ""),
        find(as_flags(certificates)),
    ):
        found = find(environment={**outer, **environment_of(given)})
        assert (found.kind, found.secret, found.paths) == (given.kind, given.secret, given.paths)
    for given in (find(environment={}), find(environment=JOB)):
        assert find(environment={**outer, **environment_of(given)}).kind == "job"  # the launcher's


def test_of_a_token_in_a_file_children_are_told_the_path_alone(token_file: Path) -> None:
    told = environment_of(find(CredentialFlags(token_file=token_file)))
    assert told["GRADSYNC_TOKEN"] == ""
    assert find(environment=told).secret == read_token(token_file)


def test_a_command_uses_what_its_flags_say_and_no_longer(token_file: Path) -> None:
    before = dict(os.environ)
    with using(find(CredentialFlags(token_file=token_file))):
        assert current().secret == read_token(token_file)
    assert dict(os.environ) == before


def test_nothing_shows_a_secret() -> None:
    for credentials in (find(environment={"GRADSYNC_TOKEN": TOKEN}), find(environment=JOB)):
        shown = f"{credentials!r} {credentials.identity!r}"
        for secret in (TOKEN, TOKEN[17:60], "5a5a", "ZZZZ", str(credentials.secret), "PRIVATE KEY"):
            assert secret not in shown


def test_going_without_is_told_once_where_a_person_started_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("common.credentials.credentials._warned", False)
    monkeypatch.setenv("GRADSYNC_INSECURE", "1")
    monkeypatch.setenv("GRADSYNC_PARENT", "1")
    current()
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("GRADSYNC_PARENT")
    current(), current()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gradsync: WARNING: GRADSYNC_INSECURE: nothing is encrypted or authenticated")


def test_a_users_secret_is_made_once_whoever_is_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: user_secret(), range(8)))
    (secret,) = found
    (file,) = (tmp_path / "gradsync").iterdir()
    assert (len(secret), file.read_bytes()) == (32, secret)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_users_secret_that_others_could_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("common.credentials.user_secret.user_folder", lambda: tmp_path / "gradsync")
    user_secret()
    (tmp_path / "gradsync" / "secret").chmod(0o644)
    with pytest.raises(UsageError, match=r"this user's secret .* can be read by others"):
        user_secret()
    (tmp_path / "gradsync").chmod(0o755)
    with pytest.raises(UsageError, match=r"no folder for this user's secret .*others can read"):
        user_secret()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_folder_or_secret_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("common.credentials.user_secret.user_folder", lambda: tmp_path / "gradsync")
    user_secret()
    os.chown(tmp_path / "gradsync" / "secret", 12345, 12345)
    with pytest.raises(UsageError, match="belongs to another user"):
        user_secret()
    os.chown(tmp_path / "gradsync", 12345, 12345)
    with pytest.raises(UsageError, match=r"no folder for this user's secret"):
        user_secret()
