"""Tokens: made once, read by their user only, and told from everything else without being shown."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from common.credentials.__main__ import main
from common.credentials.token import make_token, new_token, read_token, secret_of, token_of
from common.errors import UsageError

SECRET = bytes(range(32))
TOKEN = "gradsync-token-1-AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8-18b72cba"


def test_a_token_is_its_secret_in_another_form() -> None:
    assert token_of(SECRET) == TOKEN
    assert secret_of(TOKEN, "here") == SECRET
    assert secret_of(f"{TOKEN}\n", "here") == SECRET


def test_tokens_differ() -> None:
    assert len({new_token() for _ in range(20)}) == 20


@pytest.mark.parametrize(
    "text", ["", "password", TOKEN[:-1], TOKEN.upper(), TOKEN.replace("-1-", "-2-"), f"{TOKEN} {TOKEN}", f"x{TOKEN}"]
)
def test_what_is_no_token_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(UsageError, match="here holds no GradSync token; make one with python -m") as caught:
        secret_of(text, "here")
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize("at", range(17, 60))
def test_a_mistyped_token_is_refused(at: int) -> None:
    other = TOKEN[:at] + ("B" if TOKEN[at] == "A" else "A") + TOKEN[at + 1 :]
    with pytest.raises(UsageError, match="here holds a damaged token"):
        secret_of(other, "here")


def test_a_token_file_is_its_users_alone_and_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    before = os.umask(0)
    try:
        assert main(["token", str(file)]) == 0
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o600
    kept = file.read_text()
    assert len(read_token(file)) == 32
    assert main(["token", str(file)]) == 2
    assert file.read_text() == kept
    out, err = capsys.readouterr()
    assert f"--token-file {file}" in out
    assert err == f"common.credentials: UsageError: {file} is there already, and is never overwritten; " + (
        "choose another name\n"
    )
    assert kept.strip() not in out + err


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601])
def test_a_token_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "token"
    make_token(file)
    file.chmod(mode)
    with pytest.raises(UsageError, match=re.escape(f"can be read by others; chmod 600 {file}")):
        read_token(file)


def test_a_token_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the token file .*/none: No such file"):
        read_token(tmp_path / "none")
    with pytest.raises(UsageError, match=r"is no file|cannot read"):
        read_token(tmp_path)
