"""Which message goes next, and how much may be under way."""

from ddrl._kernel import Outbox


def taken(outbox):
    """Everything that may go now, in order."""
    found = []
    while (entry := outbox.take()) is not None:
        found.append(entry)
    return found


def test_the_earliest_message_goes_first_old_versions_before_new_ones():
    outbox = Outbox(1000, 1000)
    for entry in ((1, 0), (0, 2), (0, 1), (1, 3)):
        outbox.add(entry, 1)
    assert taken(outbox) == [(0, 1), (0, 2), (1, 0), (1, 3)]


def test_a_target_that_has_its_share_holds_up_only_its_own_messages():
    outbox = Outbox(1000, 100)
    for place, target in enumerate((1, 1, 2)):
        outbox.add((0, place), target)
    assert outbox.take() == (0, 0)
    ended = outbox.sent(1, 100)
    assert taken(outbox) == [(0, 2)]
    outbox.taken(1, ended)
    assert taken(outbox) == [(0, 1)]


def test_no_more_goes_once_the_window_is_full():
    outbox = Outbox(150, 100)
    for place in range(3):
        outbox.add((0, place), place)
    first = outbox.take() and outbox.sent(0, 100)
    assert outbox.take() == (0, 1)
    outbox.sent(1, 100)
    assert outbox.take() is None
    outbox.taken(0, first)
    assert outbox.take() == (0, 2)


def test_copied_messages_count_until_one_that_asks_has_been_taken():
    outbox = Outbox(1000, 100)
    assert not outbox.asks(1, 20)
    outbox.copied(1, 20)
    assert outbox.asks(1, 20)  # more than a quarter of the share would be unasked
    assert not outbox.asks(2, 20)
    ended = outbox.sent(1, 80)
    assert ended == 100
    outbox.add((0, 0), 1)
    assert outbox.take() is None
    outbox.taken(1, ended)
    assert outbox.take() == (0, 0)
    assert not outbox.asks(1, 20)


def test_copied_messages_alone_never_stop_a_host():
    outbox = Outbox(100, 100)
    for place in range(200):
        target = place % 50
        outbox.add((0, place), target)
        assert outbox.take() == (0, place)
        if outbox.asks(target, 10):
            outbox.taken(target, outbox.sent(target, 10))
        else:
            outbox.copied(target, 10)
