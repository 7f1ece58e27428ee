from towline.rollout.scoring_queue import BATCH_S, MAX_BATCH, MAX_BATCH_CHARS, Task, TaskQueue


def _filled(num_workers: int, *lengths: int) -> TaskQueue:
    queue = TaskQueue(num_workers)
    for ticket, length in enumerate(lengths):
        queue.append(Task(ticket=ticket, item=("x" * length, ""), key=b""))
    return queue


def _tickets(batch: list[Task]) -> list[int]:
    return [task.ticket for task in batch]


def test_one_goes_out_at_a_time_until_it_is_known_that_they_are_quick() -> None:
    queue = _filled(1, *[1] * 1000)
    assert _tickets(queue.next_batch()) == [0]
    for _ in range(1000):
        queue.pace.note(BATCH_S / 5.5)
    assert _tickets(queue.next_batch()) == [1, 2, 3, 4, 5]
    for _ in range(1000):
        queue.pace.note(0.0)
    assert len(queue.next_batch()) == MAX_BATCH
    queue.pace.note(3600.0)  # one hang counts as 0.02 s
    assert len(queue.next_batch()) == 9


def test_a_batch_is_a_share_of_what_waits() -> None:
    queue = _filled(4, *[1] * 10)
    for _ in range(1000):
        queue.pace.note(0.0)
    assert [_tickets(queue.next_batch()) for _ in range(6)] == [[0, 1, 2], [3, 4], [5, 6], [7], [8], [9]]
    assert queue.next_batch() == []


def test_long_items_go_out_alone_and_fill_the_queue() -> None:
    queue = _filled(1, MAX_BATCH_CHARS, 1, 2 * MAX_BATCH_CHARS)
    for _ in range(1000):
        queue.pace.note(0.0)
    assert queue.has_room
    assert [_tickets(queue.next_batch()) for _ in range(3)] == [[0], [1], [2]]
    assert not _filled(1, *[2**20] * 4).has_room
    assert not _filled(2, *[0] * 2 * MAX_BATCH).has_room


def test_what_is_put_back_comes_first_in_its_order() -> None:
    queue = _filled(1, 1, 1, 1)
    queue.put_back([Task(ticket=8, item=("", ""), key=b""), Task(ticket=9, item=("", ""), key=b"")])
    assert [ticket for _ in range(5) for ticket in _tickets(queue.next_batch())] == [8, 9, 0, 1, 2]
    assert len(queue) == 0
