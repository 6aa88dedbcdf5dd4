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
    const auto data = noise(1500, 1);
    for (size_t begin = 0; begin < 9; ++begin) {
        for (size_t length = 0; length + begin <= 700; ++length) {
            std::vector<std::byte> out(length + 1, std::byte{0x5A});
            const uint64_t sum = ddrl::copy_with_checksum(out.data(), data.data() + begin, length);
            EXPECT(sum == ddrl::checksum(data.data() + begin, length) && sum == ddrl::checksum(out.data(), length));
            EXPECT(length == 0 || std::memcmp(out.data(), data.data() + begin, length) == 0);
            EXPECT(out[length] == std::byte{0x5A});
            EXPECT(sum == ddrl::checksum_detail::copy_narrow(out.data(), data.data() + begin, length));
        }
    }
}

static void every_single_flipped_bit_changes_it() {
    for (size_t length : {1u, 8u, 127u, 128u, 1000u}) {
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

static void its_value_is_part_of_the_layout() {
    std::vector<std::byte> data(1000);
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 7);
    EXPECT(ddrl::checksum(data.data(), data.size()) == 0xbee0bb63117673a2ull);
}

int main() {
    RUN(a_copy_has_the_checksum_of_its_source_at_any_length_and_alignment);
    RUN(every_single_flipped_bit_changes_it);
    RUN(exchanged_pieces_and_other_lengths_change_it);
    RUN(its_value_is_part_of_the_layout);
}
