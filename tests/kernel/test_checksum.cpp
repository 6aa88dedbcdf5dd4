#include "checksum.hpp"

#include <random>
#include <set>
#include <vector>

#include "expect.hpp"

static std::vector<std::byte> noise(size_t bytes, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<std::byte> data(bytes);
    for (auto& byte : data) byte = static_cast<std::byte>(random());
    return data;
}

static void a_copy_has_the_checksum_of_its_source_at_any_length_and_alignment() {
    const auto data = noise(2300, 1);
    for (size_t begin = 0; begin < 9; ++begin) {
        for (size_t length = 0; length + begin <= 2200; ++length) {
            std::vector<std::byte> out(length + 1, std::byte{0x5A});
            const uint64_t sum = ddrl::copy_with_checksum(out.data(), data.data() + begin, length);
            EXPECT(sum == ddrl::checksum(data.data() + begin, length) && sum == ddrl::checksum(out.data(), length));
            EXPECT(length == 0 || std::memcmp(out.data(), data.data() + begin, length) == 0);
            EXPECT(out[length] == std::byte{0x5A});
        }
    }
}

template <ddrl::checksum_detail::To to>
static void compare(const std::vector<std::byte>& data, size_t bytes) {
    using namespace ddrl::checksum_detail;
    std::vector<std::byte> memory(bytes + 128, std::byte{0x5A});
    std::byte* out =
        to == To::nothing ? nullptr : memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
    const uint64_t expected = whole(blocks_plain<To::nothing>, nullptr, data.data() + 3, bytes);
    std::vector<Blocks> found{blocks_plain<to>, fastest_blocks<to>()};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) found.push_back(blocks_avx2<to>);
    if (__builtin_cpu_supports("avx512f")) found.push_back(blocks_avx512<to>);
#endif
    for (Blocks blocks : found) {
        if (out) std::memset(out, 0, bytes);
        EXPECT(whole(blocks, out, data.data() + 3, bytes) == expected);
        if (out) EXPECT(bytes == 0 || std::memcmp(out, data.data() + 3, bytes) == 0);
        if (out) EXPECT(out[bytes] == std::byte{0x5A});
    }
}

static void every_vector_unit_finds_the_same_value_and_copies_the_same_bytes() {
    using enum ddrl::checksum_detail::To;
    const auto data = noise(300'000, 4);
    for (size_t bytes : {0u, 1u, 64u, 1023u, 1024u, 1025u, 4096u, 5000u, 65536u, 299'000u}) {
        compare<nothing>(data, bytes);
        compare<copy>(data, bytes);
        compare<stream>(data, bytes);
    }
}

static void a_large_copy_past_the_caches_is_whole() {
    const auto data = noise(ddrl::stream_bytes + 777, 5);
    std::vector<std::byte> memory(data.size() + 128, std::byte{0x5A});
    std::byte* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
    for (std::byte* out : {aligned, aligned + 1}) {
        EXPECT(ddrl::copy_with_checksum(out, data.data(), data.size()) == ddrl::checksum(data.data(), data.size()));
        EXPECT(std::memcmp(out, data.data(), data.size()) == 0 && out[data.size()] == std::byte{0x5A});
    }
}

static void every_single_flipped_bit_changes_it() {
    for (size_t length : {1u, 8u, 63u, 64u, 1000u, 2500u}) {
        auto data = noise(length, 2);
        const uint64_t sum = ddrl::checksum(data.data(), length);
        for (size_t bit = 0; bit < 8 * length; ++bit) {
            data[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
            EXPECT(ddrl::checksum(data.data(), length) != sum);
            data[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
        }
    }
}

static void exchanged_pieces_and_other_lengths_change_it() {
    const auto data = noise(4096, 3);
    std::set<uint64_t> sums{ddrl::checksum(data.data(), data.size())};
    size_t made = 1;
    for (size_t size : {8u, 16u, 64u, 128u, 1024u}) {
        for (size_t piece = 1; piece < data.size() / size; ++piece, ++made) {
            auto mixed = data;
            std::swap_ranges(mixed.begin(), mixed.begin() + static_cast<std::ptrdiff_t>(size),
                             mixed.begin() + static_cast<std::ptrdiff_t>(piece * size));
            sums.insert(ddrl::checksum(mixed.data(), mixed.size()));
        }
    }
    const std::vector<std::byte> zeros(4096);
    for (size_t length = 0; length <= 300; ++length, ++made) sums.insert(ddrl::checksum(zeros.data(), length));
    EXPECT(sums.size() == made);
}

static void bytes_that_come_in_parts_have_the_checksum_of_the_whole() {
    std::mt19937_64 random(6);
    for (const size_t largest : {1u, 100u, 3000u}) {
        const auto data = noise(9000, largest);
        for (size_t length = 0; length <= data.size(); length += 1 + random() % 700) {
            ddrl::Checksum parts;
            for (size_t at = 0; at < length;) {
                const size_t part = std::min<size_t>(random() % (largest + 1), length - at);
                parts.add(data.data() + at, part);
                at += part;
                EXPECT(at < length || parts.value() == ddrl::checksum(data.data(), length));
            }
        }
    }
    EXPECT(ddrl::Checksum().value() == ddrl::checksum(nullptr, 0));
}

static void its_value_is_part_of_the_layout() {
    std::vector<std::byte> data(5000);
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 7);
    EXPECT(ddrl::checksum(data.data(), 1000) == 0x8f5798930854e2fcull);
    EXPECT(ddrl::checksum(data.data(), 5000) == 0xe550cd49ce60fcfeull);
}

int main() {
    RUN(a_copy_has_the_checksum_of_its_source_at_any_length_and_alignment);
    RUN(every_vector_unit_finds_the_same_value_and_copies_the_same_bytes);
    RUN(a_large_copy_past_the_caches_is_whole);
    RUN(every_single_flipped_bit_changes_it);
    RUN(exchanged_pieces_and_other_lengths_change_it);
    RUN(bytes_that_come_in_parts_have_the_checksum_of_the_whole);
    RUN(its_value_is_part_of_the_layout);
}
