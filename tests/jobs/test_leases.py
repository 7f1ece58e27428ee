"""Every chunk is generated once, by somebody: leases of the dead are found, given back, and given up at last."""

import threading

import pytest

from towline.jobs.leases import MAX_LOST, Leases, free_leases


def test_a_lease_is_taken_once(store):
    first, second = Leases(store, "rollout.0", 0), Leases(store, "rollout.1", 0)
    assert first.take("a")
    assert not second.take("a")
    assert not first.take("a")
    assert (first.held, second.held) == (["a"], [])


def test_many_threads_share_the_chunks_without_overlap(store):
    names = [f"chunk-{number}" for number in range(50)]
    holders = [Leases(store, f"rollout.{number}", 0) for number in range(4)]

    def take_all(leases: Leases) -> None:
        for name in names:
            leases.take(name)

    threads = [threading.Thread(target=take_all, args=(leases,)) for leases in holders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for leases in holders for name in leases.held) == sorted(names)


def test_leases_of_a_dead_engine_can_be_taken_by_another(store):
    dead, other = Leases(store, "rollout.0", 0), Leases(store, "rollout.1", 0)
    assert dead.take("a")
    assert dead.take("b")
    assert free_leases(store, "rollout.0", 0) == (["a", "b"], [])
    assert other.take("a")
    assert free_leases(store, "rollout.0", 0) == ([], []), "what another has taken is not given back again"
    assert not dead.take("a")


def test_a_silent_engine_does_not_take_again_what_it_is_still_at_work_on(store):
    silent, other = Leases(store, "rollout.0", 0), Leases(store, "rollout.1", 0)
    silent.take("a")
    free_leases(store, "rollout.0", 0)
    assert not silent.take("a"), "its requests are in the engine already"
    assert other.take("a")


def test_what_was_sealed_is_not_given_back(store):
    dead = Leases(store, "rollout.0", 0)
    dead.take("a")
    dead.take("b")
    dead.done("a")
    assert free_leases(store, "rollout.0", 0) == (["b"], [])


def test_the_next_life_of_an_engine_keeps_its_leases_when_those_of_the_last_are_freed(store):
    first, second = Leases(store, "rollout.0", 0), Leases(store, "rollout.0", 1)
    first.take("a")
    second.take("b")
    assert free_leases(store, "rollout.0", 0) == (["a"], [])
    assert not Leases(store, "rollout.1", 0).take("b")


def test_an_engine_that_dies_between_noting_and_taking_leaves_nothing_behind(store):
    dying = Leases(store, "rollout.0", 0)

    def die() -> None:
        raise KeyboardInterrupt

    store.before_exchange = die
    with pytest.raises(KeyboardInterrupt):
        dying.take("a")
    store.before_exchange = lambda: None
    assert free_leases(store, "rollout.0", 0) == ([], [])
    assert Leases(store, "rollout.1", 0).take("a")


def test_a_chunk_lost_three_times_is_given_up(store):
    for life in range(MAX_LOST):
        assert Leases(store, "rollout.0", life).take("a"), life
        free, given_up = free_leases(store, "rollout.0", life)
        assert (free, given_up) == (([], ["a"]) if life == MAX_LOST - 1 else (["a"], []))
    assert not Leases(store, "rollout.1", 0).take("a")


def test_a_wall_clock_that_jumps_frees_no_lease(store, monkeypatch):
    holder = Leases(store, "rollout.0", 0)
    assert holder.take("a")
    monkeypatch.setattr("time.time", lambda: 1e12)
    assert not Leases(store, "rollout.1", 0).take("a")
    assert free_leases(store, "rollout.0", 0) == (["a"], [])
