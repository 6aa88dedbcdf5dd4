"""Rollouts are held back by as many versions as asked for."""

from __future__ import annotations

import numpy as np

from benchmarks.learning.lag import LateMailbox
from ddrl.channels.mailbox import Mailbox


def test_a_version_carries_the_parameters_of_as_many_versions_before_and_its_own_stamp() -> None:
    mailbox = Mailbox.create(None, 64, 3, 1)
    reader = mailbox.reader(0)
    late = LateMailbox(mailbox, 3, np.full(64, 0, np.uint8))
    seen = []
    for version in range(1, 8):
        assert late.publish(np.full(64, version, np.uint8), version, (version / 2,))
        pin = reader.pin()
        assert pin is not None
        assert (pin.version, pin.values[0]) == (version, version / 2)
        seen.append(int(pin.data[0]))
    assert seen == [0, 0, 0, 1, 2, 3, 4]
    assert late.newest == 7  # all else is the mailbox's own


def test_zero_versions_are_the_run_as_it_is() -> None:
    mailbox = Mailbox.create(None, 64, 3, 1)
    late = LateMailbox(mailbox, 0, np.zeros(64, np.uint8))
    late.publish(np.full(64, 5, np.uint8), 1)
    pin = mailbox.reader(0).pin()
    assert pin is not None
    assert pin.data[0] == 5
