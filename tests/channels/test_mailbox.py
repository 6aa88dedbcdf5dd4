import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddrl.channels import Doorbell, Mailbox, checksum
from ddrl.core.errors import ChannelError

NBYTES = 200


def vector(version: int, nbytes: int = NBYTES) -> np.ndarray:
    return ((np.arange(nbytes) * 31 + version) % 251).astype(np.uint8)


def test_a_reader_pins_the_newest_version_without_a_copy(name):
    mailbox = Mailbox.create(name(), NBYTES, 3, 2)
    other = Mailbox.attach(name())
    reader = other.reader(1)
    assert reader.pin() is None
    assert mailbox.newest == other.newest == -1
    assert mailbox.publish(vector(5), 5, (1.5, 2.5))
    pin = reader.pin()
    assert pin.version == other.newest == 5
    assert pin.values == (1.5, 2.5, 0, 0, 0, 0, 0, 0)
    assert pin.checksum == checksum(vector(5)) == checksum(pin.data)
    np.testing.assert_array_equal(pin.data, vector(5))
    assert pin.data.ctypes.data == other.slot_view(pin.slot).ctypes.data
    assert pin.data.ctypes.data % 64 == 0
    assert not pin.data.flags.writeable
    assert reader.pin() is pin


def test_a_slot_filled_in_place_is_sealed_with_what_it_carries():
    mailbox = Mailbox.create(None, NBYTES, 3, 1)
    reader = mailbox.reader(0)
    slot = mailbox.begin(0)
    slot.data[:] = vector(0)
    assert reader.pin() is None
    assert slot.seal(range(8), time_ns=123)
    pin = reader.pin()
    assert (pin.version, pin.time_ns, pin.checksum, pin.slot) == (0, 123, checksum(vector(0)), slot.index)
    assert pin.values == tuple(map(float, range(8)))
    with pytest.raises(ValueError, match="at most 8 values"):
        mailbox.begin(1).seal(range(9))


def test_a_foreign_checksum_travels_untouched():
    mailbox = Mailbox.create(None, NBYTES, 3, 1)
    slot = mailbox.begin(1)
    slot.data[:] = 0
    slot.seal(checksum=2**64 - 1)
    assert mailbox.reader(0).pin().checksum == 2**64 - 1


def test_versions_in_flight_may_be_sealed_out_of_order():
    mailbox = Mailbox.create(None, NBYTES, 4, 1)
    early, late, never = mailbox.begin(1), mailbox.begin(2), mailbox.begin(3)
    assert len({early.index, late.index, never.index}) == 3
    assert late.seal()
    assert not early.seal()
    never.abandon()
    assert mailbox.newest == mailbox.reader(0).pin().version == 2
    with pytest.raises(ValueError, match="not open"):
        early.seal()


def test_a_writer_without_a_free_slot_takes_the_oldest_pin():
    mailbox = Mailbox.create(None, NBYTES, 3, 2)
    slow, slower = mailbox.reader(0), mailbox.reader(1)
    mailbox.publish(vector(1), 1)
    oldest = slower.pin()
    mailbox.publish(vector(2), 2)
    middle = slow.pin()
    mailbox.publish(vector(3), 3)
    assert mailbox.try_begin(4) is None
    assert oldest.valid()
    mailbox.publish(vector(4), 4)
    assert not oldest.valid()
    assert middle.valid()
    assert mailbox.revoked == 1
    np.testing.assert_array_equal(middle.data, vector(2))
    assert slower.pin().version == 4


def test_a_publish_is_put_off_while_transfers_hold_every_slot():
    mailbox = Mailbox.create(None, NBYTES, 3, 3)
    transfers = [mailbox.reader(i, firm=True) for i in range(2)]
    for version in range(2):
        mailbox.publish(vector(version), version)
        pin = transfers[version].pin()
    mailbox.publish(vector(2), 2)
    assert not mailbox.publish(vector(3), 3)
    with pytest.raises(ChannelError, match=r"; lower cluster\.versions_in_flight"):
        mailbox.begin(3)
    assert pin.valid()
    transfers[0].unpin()
    assert mailbox.publish(vector(3), 3)
    assert mailbox.revoked == 0


def test_a_bell_rings_for_every_newest_version():
    memory = np.zeros(128, np.uint8)
    begin = -memory.ctypes.data % 64
    mailbox = Mailbox.create(None, NBYTES, 4, 1)
    mailbox.bell = Doorbell(memory[begin : begin + 64], True)
    late, early = mailbox.begin(9), mailbox.begin(8)
    late.seal()
    early.seal()
    assert mailbox.bell.value == 1


def test_a_vector_of_another_size_is_refused():
    with pytest.raises(ChannelError, match="holds vectors of 200 bytes, got 100"):
        Mailbox.create(None, NBYTES, 3, 1).publish(vector(0)[:100], 0)


@settings(max_examples=80)
@given(
    slots=st.integers(2, 5),
    actions=st.lists(st.tuples(st.sampled_from(["publish", "pin", "unpin", "check"]), st.integers(0, 2)), max_size=80),
)
def test_any_interleaving_keeps_valid_pins_whole(slots, actions):
    mailbox = Mailbox.create(None, NBYTES, slots, 3)
    readers = [mailbox.reader(i) for i in range(3)]
    pins = [None] * 3
    version = -1
    for what, who in actions:
        if what == "publish":
            valid = {pin.version for pin in pins if pin is not None and pin.valid()}
            assert mailbox.publish(vector(version + 1), version + 1)
            lost = valid - {pin.version for pin in pins if pin is not None and pin.valid()}
            # One is taken, the oldest, and only where each slot was the newest version or pinned.
            assert lost == ({min(valid - {version})} if len(valid | {version}) == slots else set())
            version += 1
        elif what == "pin":
            pins[who] = readers[who].pin()
            assert (pins[who].version if pins[who] else -1) == version
        elif what == "unpin":
            readers[who].unpin()
            pins[who] = None
        for pin in pins:
            if pin is not None and pin.valid():
                np.testing.assert_array_equal(pin.data, vector(pin.version))
    assert mailbox.newest == version


READER = """
import sys
from ddrl.channels import Mailbox
mailbox = Mailbox.attach(sys.argv[1])
reader = mailbox.reader(int(sys.argv[2]))
pin = reader.pin()
print(pin.version, flush=True)
sys.stdin.read()
"""


def test_a_dead_readers_pin_is_freed_before_a_living_ones_is_taken(name, process):
    mailbox = Mailbox.create(name(), NBYTES, 3, 2)
    mailbox.publish(vector(0), 0)
    mine = mailbox.reader(0).pin()
    mailbox.publish(vector(1), 1)
    child = process(READER, name(), 1)
    assert child.stdout.readline() == "1\n"
    mailbox.publish(vector(2), 2)
    assert mailbox.try_begin(3) is None
    child.kill()
    child.wait()
    assert mailbox.release_dead() == 1
    assert mailbox.publish(vector(3), 3)
    assert mine.valid()
    assert mailbox.revoked == 0
    assert mailbox.release_dead() == 0


def test_a_writer_that_lacks_a_slot_frees_the_pins_of_the_dead_by_itself(name, process):
    mailbox = Mailbox.create(name(), NBYTES, 2, 2)
    mailbox.publish(vector(0), 0)
    child = process(READER, name(), 1)
    assert child.stdout.readline() == "0\n"
    child.kill()
    child.wait()
    mailbox.publish(vector(1), 1)  # into the other slot
    slot = mailbox.try_begin(2)
    assert slot is not None
    slot.abandon()
    assert mailbox.revoked == 0


def test_a_place_held_by_a_living_process_is_refused(name, process):
    mailbox = Mailbox.create(name(), NBYTES, 3, 1)
    mailbox.publish(vector(0), 0)
    child = process(READER, name(), 0)
    child.stdout.readline()
    with pytest.raises(ChannelError, match=f"held by process {child.pid}"):
        mailbox.reader(0)
    child.kill()
    child.wait()
    assert mailbox.reader(0).pin().version == 0
    with pytest.raises(ChannelError, match=r"places 0 .. 0, not 1"):
        mailbox.reader(1)


def test_a_released_place_can_be_taken_by_another(name, process):
    mailbox = Mailbox.create(name(), NBYTES, 3, 1)
    mailbox.publish(vector(0), 0)
    mailbox.reader(0).release()
    assert process(READER, name(), 0).stdout.readline() == "0\n"


WAITER = """
import sys
from ddrl.channels import Mailbox
mailbox = Mailbox.attach(sys.argv[1])
print("up", flush=True)
print(mailbox.wait_newer(4, None), flush=True)
"""


def test_a_process_waits_for_a_newer_version(name, process):
    mailbox = Mailbox.create(name(), NBYTES, 3, 1)
    mailbox.publish(vector(4), 4)
    assert mailbox.wait_newer(4, 0.001) == 4
    child = process(WAITER, name())
    assert child.stdout.readline() == "up\n"
    mailbox.publish(vector(5), 5)
    assert child.stdout.readline() == "5\n"


PINNER = """
import sys
from ddrl.channels import Mailbox
reader = Mailbox.attach(sys.argv[1]).reader(0)
assert reader.wait_pin(4, 0.001).version == 4  # nothing newer in time
held = reader.pin()
print("up", flush=True)
pin = reader.wait_pin(4, None)
print(pin.version, pin is reader.pin(), pin is held, held.version, flush=True)
"""


def test_a_process_waits_for_a_newer_version_and_pins_it_in_one_call(name, process):
    mailbox = Mailbox.create(name(), NBYTES, 3, 1)
    assert mailbox.reader(0).wait_pin(-1, 0.001) is None
    mailbox.publish(vector(4), 4)
    mailbox.kernel.release(0)
    child = process(PINNER, name())
    assert child.stdout.readline() == "up\n"
    mailbox.publish(vector(5), 5)
    assert child.stdout.readline() == "5 True False 4\n"


STRESS = """
import sys
from ddrl.channels import Mailbox, checksum
mailbox = Mailbox.attach(sys.argv[1])
reader = mailbox.reader(int(sys.argv[2]))
mailbox.wait_newer(-1, None)
whole = lost = versions = 0
last = -1
while versions < int(sys.argv[3]):
    pin = reader.pin()
    total = checksum(pin.data)
    if pin.valid():
        assert total == pin.checksum == int(pin.values[0]) * 2**32 + int(pin.values[1]), pin.version
        assert pin.version >= last
        whole += 1
        versions += pin.version != last
        last = pin.version
    else:
        lost += 1
print(whole, lost, versions, flush=True)
"""


def test_processes_read_whole_versions_while_a_writer_publishes_as_fast_as_it_can(name, process):
    nbytes, enough = 100_000, 300
    mailbox = Mailbox.create(name(), nbytes, 3, 3)
    children = [process(STRESS, name(), i, enough) for i in range(3)]
    source = np.random.default_rng(1).integers(0, 256, nbytes + 64, np.uint8)
    version = 0
    while any(child.poll() is None for child in children):
        data = source[version % 64 :][:nbytes]
        total = checksum(data)
        assert mailbox.publish(data, version, (total >> 32, total & 0xFFFFFFFF))
        version += 1
    for child in children:
        assert child.returncode == 0
        whole, _, versions = map(int, child.stdout.read().split())
        assert whole >= versions >= enough


def test_the_checksum_is_of_the_bytes_alone():
    data = np.arange(1000, dtype=np.float32)
    assert checksum(data) == checksum(data.view(np.uint8)) == checksum(data.reshape(10, 100))
    assert checksum(data) != checksum(data[:-1])
    other = data.copy()
    other[3], other[500] = data[500], data[3]
    assert checksum(other) != checksum(data)
