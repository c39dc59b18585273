"""What waits to be sent goes in the order in which it was put."""

from __future__ import annotations

from collections.abc import Iterator

from ps.client.outbox import Outbox


def test_messages_go_in_the_order_in_which_they_were_put() -> None:
    outbox: Outbox[str] = Outbox()
    outbox.put(["commit"])
    outbox.put(iter(()))  # of nothing there is nothing to send
    outbox.put(["16", "32"])
    messages = iter(outbox)
    assert [next(messages) for _ in range(2)] == ["commit", "16"]
    outbox.put(["0"])
    outbox.end()
    assert list(messages) == ["32", "0"]


def test_messages_are_made_only_when_they_are_sent() -> None:
    made = []

    def making() -> Iterator[str]:
        for name in "ab":
            made.append(name)
            yield name

    outbox: Outbox[str] = Outbox()
    outbox.put(making())
    outbox.end()
    messages = iter(outbox)
    assert (next(messages), made) == ("a", ["a"])
    assert (list(messages), made) == (["b"], ["a", "b"])
