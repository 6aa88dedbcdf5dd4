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
    ended = outbox.sent((0, 0), 1, 100)
    assert taken(outbox) == [(0, 2)]
    outbox.taken((0, 0), 1, ended)
    assert taken(outbox) == [(0, 1)]


def test_no_more_goes_once_the_window_is_full():
    outbox = Outbox(150, 100)
    for place in range(3):
        outbox.add((0, place), place)
    first = outbox.take() and outbox.sent((0, 0), 0, 100)
    assert outbox.take() == (0, 1)
    outbox.sent((0, 1), 1, 100)
    assert outbox.take() is None
    outbox.taken((0, 0), 0, first)
    assert outbox.take() == (0, 2)


def test_copied_messages_count_until_one_that_asks_has_been_taken():
    outbox = Outbox(1000, 100)
    assert not outbox.asks(1, 30)
    outbox.copied(1, 30)
    assert outbox.asks(1, 30)  # more than half of the share would be unasked
    assert not outbox.asks(2, 30)
    ended = outbox.sent((0, 0), 1, 70)
    assert ended == 100
    outbox.add((0, 1), 1)
    assert outbox.take() is None
    outbox.taken((0, 0), 1, ended)
    assert outbox.take() == (0, 1)
    assert not outbox.asks(1, 30)


def test_copied_messages_alone_never_stop_a_host():
    outbox = Outbox(100, 100)
    for place in range(200):
        target = place % 50
        outbox.add((0, place), target)
        assert outbox.take() == (0, place)
        if outbox.asks(target, 10):
            outbox.taken((0, place), target, outbox.sent((0, place), target, 10))
        else:
            outbox.copied(target, 10)


def test_a_little_to_each_of_many_targets_is_no_more_than_the_window():
    outbox = Outbox(100, 50)
    for target in range(50):
        outbox.add((0, target), target)
    gone = []
    while (entry := outbox.take()) is not None:
        gone.append(entry)
        if outbox.asks(entry[1], 10):
            outbox.sent(entry, entry[1], 10)
        else:
            outbox.copied(entry[1], 10)
    assert gone == [(0, target) for target in range(10)]


def test_a_message_that_stands_before_all_under_way_goes_although_nothing_has_room():
    """A receiver that takes messages in order waits for it, and takes none of the others before."""
    outbox = Outbox(100, 50)
    outbox.add((0, 5), 1)
    assert outbox.take() == (0, 5)
    ended = outbox.sent((0, 5), 1, 100)
    outbox.add((0, 6), 1)
    outbox.add((0, 3), 1)
    assert taken(outbox) == [(0, 3)]
    outbox.sent((0, 3), 1, 50)
    outbox.add((0, 4), 1)
    assert outbox.take() is None
    outbox.taken((0, 3), 1, 50)
    assert taken(outbox) == [(0, 4)]
    outbox.taken((0, 5), 1, ended)
    assert taken(outbox) == [(0, 6)]


def test_what_waits_for_one_target_goes_once_it_stands_before_all_that_is_under_way():
    outbox = Outbox(1000, 50)
    ended = [outbox.sent(entry, target, 50) for entry, target in (((0, 1), 1), ((0, 5), 2))]
    outbox.add((0, 3), 2)
    assert outbox.take() is None  # (0, 1) stands before it
    outbox.taken((0, 1), 1, ended[0])
    assert taken(outbox) == [(0, 3)]
