"""What waits to be sent goes in the order in which it was put."""

from __future__ import annotations

from collections.abc import Iterator

from ps.planes.send_queue import SendQueue


def test_messages_go_in_the_order_in_which_they_were_put() -> None:
    queue: SendQueue[str] = SendQueue()
    queue.put(["commit"])
    queue.put(iter(()))  # of nothing there is nothing to send
    queue.put(["16", "32"])
    messages = iter(queue)
    assert [next(messages) for _ in range(2)] == ["commit", "16"]
    queue.put(["0"])
    queue.end()
    assert list(messages) == ["32", "0"]


def test_messages_are_made_only_when_they_are_sent() -> None:
    made = []

    def making() -> Iterator[str]:
        for name in "ab":
            made.append(name)
            yield name

    queue: SendQueue[str] = SendQueue()
    queue.put(making())
    queue.end()
    messages = iter(queue)
    assert (next(messages), made) == ("a", ["a"])
    assert (list(messages), made) == (["b"], ["a", "b"])
